package identity

import (
	"context"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
)

// memory remembers what the API server answered to questions of one kind. Safe for concurrent use.
//
// A question is asked once, however many callers have it, and goes on when they have left. A caller
// that has a former answer waits for at most [patience]. After that, or when the API server could
// not be asked, the former answer stands in, and is used for [stood] without a question.
type memory[K comparable, V any] struct {
	asking  singleflight.Group
	mu      sync.Mutex
	answers map[K]answer[V]
}

// answer is an answer of the API server.
type answer[V any] struct {
	value V
	// refused is why the answer is no, or nil.
	refused error
	// until is how long the answer is used without a question. A refusal is used for longer: see
	// get.
	until time.Time
	// stands is how long it stands in. A zero time: never.
	stands time.Time
}

func newMemory[K comparable, V any]() memory[K, V] { return memory[K, V]{answers: map[K]answer[V]{}} }

// get returns the answer to the question key, which ask asks. A refusal is remembered for no. The
// question waits in the lane that laneOf returns, unless the former answer, of whatever age, was
// yes. Callers share a question if it waits in the same lane. An error of get that is not the
// answer's, or laneOf's, says that there is none.
func (m *memory[K, V]) get(ctx context.Context, key K, no time.Duration, laneOf func(context.Context) (lane, error),
	ask func(ctx context.Context) (answer[V], error)) (V, error) {
	m.mu.Lock()
	former, known := m.answers[key]
	m.mu.Unlock()
	now, until := time.Now(), former.until
	if former.refused != nil {
		until = until.Add(no)
	}
	if known && now.Before(until) {
		return former.value, former.refused
	}
	var l lane
	var err error
	if !known || former.refused != nil {
		if l, err = laneOf(ctx); err != nil {
			var none V
			return none, err
		}
	}
	asked := m.asking.DoChan(fmt.Sprintf("%p %#v", append(l, nil)[0], key), func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askTimeout)
		defer cancel()
		if err := l.wait(ctx); err != nil {
			return nil, fmt.Errorf("too many unknown tokens or rights to ask about: %v", err)
		}
		a, err := ask(ctx)
		if err == nil {
			m.remember(key, a)
		}
		return a, err
	})
	stands := now.Before(former.stands)
	var impatient <-chan time.Time
	if stands {
		impatient = time.After(patience)
	}
	select {
	case got := <-asked:
		if got.Err == nil {
			a := got.Val.(answer[V])
			return a.value, a.refused
		}
		err = got.Err
	case <-impatient:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if !stands {
		var none V
		return none, err
	}
	return m.standIn(key, former)
}

// remember remembers an answer.
func (m *memory[K, V]) remember(key K, a answer[V]) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.makeRoom()
	m.answers[key] = a
}

// standIn has the former answer be used again without a question, and returns it, or another one
// that has come by now.
func (m *memory[K, V]) standIn(key K, former answer[V]) (V, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	a, ok := m.answers[key]
	if ok && !a.until.Equal(former.until) {
		return a.value, a.refused
	}
	a = former
	if a.until = time.Now(); a.refused == nil {
		if a.until = a.until.Add(stood); a.until.After(a.stands) {
			a.until = a.stands
		}
	}
	m.answers[key] = a
	return a.value, a.refused
}

// makeRoom deletes answers when there are maxRemembered. It deletes old answers and refusals first,
// then any others until half of maxRemembered is left. Unknown tokens must not remove the answers
// about all agents at once.
func (m *memory[K, V]) makeRoom() {
	if len(m.answers) < maxRemembered {
		return
	}
	now := time.Now()
	for _, stale := range []bool{true, false} {
		for key, a := range m.answers {
			if !stale && len(m.answers) <= maxRemembered/2 {
				return
			}
			if !stale || a.refused != nil || now.After(a.until.Add(remember)) {
				delete(m.answers, key)
			}
		}
	}
}
