package coordinator

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/util/workqueue"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// owned is a request of a controller for a pod of an owner.
func owned(kind, owner, name string) Request {
	return Request{Pod: pod(name), Owner: kind + "/" + owner, Controller: kind, Targets: targetsOf(web)}
}

// A worker of the controller waits inside each call. Without this, five ReplicaSets that are scaled
// in keep the controller from everything else.
func TestAControllerIsHeldForFewOwners(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		one := n.agent("one", []drain.Service{web}, "replica-0")
		hold := func(request Request) <-chan answer {
			answers := make(chan answer, 1)
			go func() {
				var a answer
				a.Status, a.held, a.err = r.Drain(t.Context(), request, time.Now().Add(2*time.Second))
				answers <- a
			}()
			synctest.Wait()
			return answers
		}
		for _, owner := range []string{"1", "2", "3"} {
			stillHeld(t, hold(owned("ReplicaSet", owner, "a"+owner)))
		}
		if got := r.metric("lameduck_controller_holds", "ReplicaSet"); got != 3 {
			t.Errorf("%v calls are counted", got)
		}
		fourth := owned("ReplicaSet", "4", "a4")
		if a := taken(t, hold(fourth)); !errors.Is(a.err, ErrTooManyOwners) || a.held {
			t.Errorf("the fourth: %s", a)
		}
		if one.exclusions.holders(pod("a4")) == "" {
			t.Error("its drain does not continue")
		}
		if _, crowded := r.Claim(fourth); !errors.Is(crowded, ErrTooManyOwners) {
			t.Errorf("the fourth, of a witness: %v", crowded)
		}
		stillHeld(t, hold(owned("ReplicaSet", "1", "b1"))) // another pod of an owner that is held
		stillHeld(t, hold(owned("StatefulSet", "5", "a5")))
		other := fourth
		other.Pod, other.Controller = pod("b4"), "" // kubectl deletes a pod of it
		stillHeld(t, hold(other))
		one.say(pod("a4"), drain.Idle)
		if a := taken(t, hold(fourth)); a.err != nil || a.Phase != drain.Released {
			t.Errorf("the fourth, released meanwhile: %s", a)
		}
		fourth.Pod = pod("c4")
		if a := taken(t, hold(fourth)); !errors.Is(a.err, ErrTooManyOwners) {
			t.Errorf("its next pod: %s", a)
		}
		one.say(pod("a2"), drain.Idle)
		stillHeld(t, hold(fourth))
		time.Sleep(drain.DefaultTimes().Deadline + ownerKept + 2*Tick)
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.core.owners) != 0 {
			t.Errorf("owners %v are known at the end", r.core.owners)
		}
	})
}

// Controllers choose at random among equal pods each time they try again. Without this, each
// attempt takes another pod out of traffic.
func TestAnOwnerThatIsRefusedLosesLittleTraffic(t *testing.T) {
	for kind, first := range map[string]bool{"DaemonSet": false, "ReplicaSet": true} {
		synctest.Test(t, func(t *testing.T) {
			n := newNetwork(t)
			r := n.replica("replica-0", "a")
			one := n.agent("one", []drain.Service{web}, "replica-0")
			drainNow := func(owner, name string) error {
				_, _, err := r.Drain(t.Context(), owned(kind, owner, name), time.Now().Add(time.Second))
				return err
			}
			for i := range OwnersHeld[kind] {
				if err := drainNow(fmt.Sprint("held-", i), fmt.Sprint("held-", i)); err != nil {
					t.Fatal(err)
				}
			}
			for _, name := range []string{"b", "c", "d"} {
				err := drainNow("2", name)
				r.mu.Lock()
				drains := r.core.Ledger.Pod(pod(name).UID).Draining
				r.mu.Unlock()
				if !errors.Is(err, ErrTooManyOwners) || drains != (first && name == "b") {
					t.Errorf("%s of another %s: %v, it drains: %t", name, kind, err, drains)
				}
				time.Sleep(firstPause)
			}
			one.say(pod("held-0"), drain.Idle)
			if err := drainNow("2", "e"); err != nil {
				t.Errorf("%s: after the first: %v", kind, err)
			}
		})
	}
}

// The back-off of a controller doubles up to 1,000 s, with each failed attempt. Without this, pods
// whose deletion was refused too often stay for that long.
func TestAControllerIsNotRefusedForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		n.agent("one", []drain.Service{web}, "replica-0")
		ask := func(owner, name string) error {
			_, _, err := r.Drain(t.Context(), owned("ReplicaSet", owner, name), time.Now().Add(time.Millisecond))
			return err
		}
		for _, owner := range []string{"1", "2", "3"} {
			_ = ask(owner, "a"+owner)
		}
		for attempt := range maxRefusals {
			time.Sleep(2 * sameAttempt)
			for _, name := range []string{"a4", "b4"} { // one attempt deletes both
				if err := ask("4", name); !errors.Is(err, ErrTooManyOwners) {
					t.Fatalf("%s in attempt %d: %v", name, attempt+1, err)
				}
			}
		}
		time.Sleep(2 * sameAttempt)
		if err := ask("4", "b4"); err != nil {
			t.Errorf("attempt %d: %v", maxRefusals+1, err)
		}
		if err := ask("5", "a5"); !errors.Is(err, ErrTooManyOwners) {
			t.Errorf("another owner: %v", err)
		}
	})
}

// shift is a controller with five workers and the queue of kube-controller-manager's, whose client
// repeats requests as client-go does. It scales sets to 0.
type shift struct {
	r     *replica
	kind  string
	queue workqueue.TypedRateLimitingInterface[string]

	mu sync.Mutex
	// living are the pods of each set. asked is when each pod was first asked for, took how long
	// its deletion took then.
	living map[string][]drain.UID
	asked  map[drain.UID]time.Time
	took   map[drain.UID]time.Duration
	// added is when another set had to be handled, and bystander how long that took at most. early
	// are the pods that were let go before their deadline.
	added     time.Time
	bystander time.Duration
	early     int
}

func (s *shift) work() {
	for {
		set, stop := s.queue.Get()
		if stop {
			return
		}
		if err := s.handle(set); err != nil {
			s.queue.AddRateLimited(set)
		} else {
			s.queue.Forget(set)
		}
		s.queue.Done(set)
	}
}

// handle deletes all pods of a set in parallel, as ReplicaSetController.manageReplicas does.
func (s *shift) handle(set string) error {
	s.mu.Lock()
	if set == "bystander" {
		s.bystander, s.added = max(s.bystander, time.Since(s.added)), time.Time{}
		s.mu.Unlock()
		return nil
	}
	pods := slices.Clone(s.living[set])
	s.mu.Unlock()
	errs := make([]error, len(pods))
	var deletes sync.WaitGroup
	for i, uid := range pods {
		deletes.Go(func() { errs[i] = s.deletePod(set, uid) })
	}
	deletes.Wait()
	return errors.Join(errs...)
}

func (s *shift) deletePod(set string, uid drain.UID) error {
	s.mu.Lock()
	if s.asked[uid].IsZero() {
		s.asked[uid] = time.Now()
	}
	s.mu.Unlock()
	for range 11 {
		s.mu.Lock()
		request := Request{Pod: drain.Pod{Namespace: "shop", Name: string(uid), UID: uid}, Owner: "ReplicaSet/" + set,
			Controller: s.kind, Targets: []drain.Targets{{Service: drain.Service{Namespace: "shop", Name: set},
				Usable: slices.Clone(s.living[set])}}}
		last := len(s.living[set]) == 1
		s.mu.Unlock()
		if last { // what package admission does
			s.deleted(set, drain.Status{Pod: request.Pod})
			return nil
		}
		status, held, err := s.r.Drain(context.Background(), request, time.Now().Add(2*time.Second))
		switch {
		case errors.Is(err, ErrTooManyOwners):
			return err
		case err == nil && !status.Waits():
			s.deleted(set, status)
			return nil
		}
		time.Sleep(drain.RetryAfter(time.Since(status.Since), held, time.Until(status.Deadline)))
	}
	return errors.New("429")
}

// deleted records that a pod is deleted. The informer brings the controller back to its set then,
// and again when the pod has stopped.
func (s *shift) deleted(set string, status drain.Status) {
	uid := status.Pod.UID
	s.r.GatePassed(uid)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.living[set] = slices.DeleteFunc(s.living[set], func(u drain.UID) bool { return u == uid })
	s.took[uid] = time.Since(s.asked[uid])
	if status.Reason == drain.Deadline && time.Since(status.Since) < drain.DefaultTimes().Deadline {
		s.early++
	}
	s.queue.Add(set)
	s.queue.AddAfter(set, time.Second)
}

// A controller deletes the pods of 30 sets beside a gateway that is slow to acknowledge. Its queue,
// with its back-off, is that of client-go. Another set, which has something to be done each second,
// must not wait for the held deletions, no deletion may take much longer than it is held for, and
// none is let go for that.
func TestControllersKeepWorkers(t *testing.T) {
	tests := []struct {
		name, kind string
		pods       int
		idle       time.Duration
		// least and most bound how long the other set waits.
		least, most time.Duration
	}{
		{"any caller", "", 2, 10 * time.Second, 50 * time.Second, 90 * time.Second},
		{"a controller", "ReplicaSet", 2, 10 * time.Second, 0, time.Second},
		{"a controller, soon idle", "ReplicaSet", 2, 3 * time.Second, 0, time.Second},
		{"a controller, half of 16 pods at a time", "ReplicaSet", 16, 3 * time.Second, 0, 15 * time.Second},
		{"a controller, half of 16 pods at a time, longer", "ReplicaSet", 16, 10 * time.Second, 0, 15 * time.Second},
		{"a controller, almost the deadline", "ReplicaSet", 2, 29 * time.Second, 0, 15 * time.Second},
	}
	const sets = 30
	const longest = 41 * time.Second // the deadline, and the controller's pause
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNetwork(t)
				r := n.replica("replica-0", "a", func(o *Options) {
					o.MaxHolds, o.MaxHoldsPerOwner = DefaultHolds, DefaultHoldsPerOwner
				})
				s := &shift{r: r, kind: test.kind, living: map[string][]drain.UID{}, asked: map[drain.UID]time.Time{},
					took: map[drain.UID]time.Duration{},
					queue: workqueue.NewTypedRateLimitingQueue(
						workqueue.DefaultTypedControllerRateLimiter[string]())}
				var services []drain.Service
				for i := range sets {
					set := fmt.Sprintf("set-%02d", i)
					services = append(services, drain.Service{Namespace: "shop", Name: set})
					for k := range test.pods {
						s.living[set] = append(s.living[set], drain.UID(fmt.Sprintf("%s-%02d", set, k)))
					}
				}
				one := n.agent("one", services, "replica-0")
				ctx, cancel := context.WithCancel(t.Context())
				var running sync.WaitGroup
				running.Go(func() {
					for seen := map[drain.UID]time.Time{}; ctx.Err() == nil; {
						one.exclusions.idleAfter(test.idle, seen)
						one.Wake()
						time.Sleep(100 * time.Millisecond)
					}
				})
				for range 5 {
					running.Go(s.work)
				}
				began := time.Now()
				for _, set := range slices.Sorted(maps.Keys(s.living)) {
					s.queue.Add(set)
				}
				for end, done := began.Add(20*time.Minute), false; !done && time.Now().Before(end); {
					time.Sleep(time.Second)
					s.mu.Lock()
					done = len(s.took) == sets*test.pods
					if s.added.IsZero() {
						s.added = time.Now()
						s.queue.Add("bystander")
					}
					s.mu.Unlock()
				}
				took := time.Since(began)
				s.queue.ShutDown()
				cancel()
				running.Wait()
				most := slices.Max(slices.Collect(maps.Values(s.took)))
				t.Logf("%d pods are deleted after %.0f s, each %.1f s after it was asked for at most; another "+
					"set waits for up to %.1f s", len(s.took), took.Seconds(), most.Seconds(), s.bystander.Seconds())
				if len(s.took) != sets*test.pods || most > longest || s.bystander < test.least ||
					s.bystander > test.most || s.early > 0 {
					t.Errorf("%d deletions, the longest of %s; %s; %d were let go", len(s.took), most, s.bystander,
						s.early)
				}
			})
		})
	}
}

// idleAfter makes the exclusions idle that were first seen so long ago.
func (s *exclusions) idleAfter(d time.Duration, seen map[drain.UID]time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for uid, of := range s.of {
		if seen[uid].IsZero() {
			seen[uid] = time.Now()
		}
		if time.Since(seen[uid]) >= d {
			of.state = drain.Idle
		}
	}
}
