package journal

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// roles are what a child of this test program does instead of testing.
var roles = map[string]func(dir string) error{"exclude": buryForEver, "small disk": onSmallDisk}

func TestMain(m *testing.M) {
	if role := roles[os.Getenv("JOURNAL_TEST_ROLE")]; role != nil {
		if err := role(os.Getenv("JOURNAL_TEST_DIR")); err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// child starts this program in another role. It is killed when the test ends.
func child(t *testing.T, role, dir string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "JOURNAL_TEST_ROLE="+role, "JOURNAL_TEST_DIR="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

var quiet = slog.New(slog.DiscardHandler)

// open opens the journal in dir and runs it until the returned function is called, or the test
// ends.
func open(t testing.TB, dir string, set ...func(*Journal)) (j *Journal, stop func()) {
	t.Helper()
	j, err := Open(t.Context(), dir, nil, quiet)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range set {
		f(j)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := j.Run(ctx); err != nil {
			t.Errorf("Run returns %v", err)
		}
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		<-ended
		j.Close()
	})
	t.Cleanup(stop)
	return j, stop
}

func pod(i int) drain.Pod {
	return drain.Pod{Namespace: "shop", Name: fmt.Sprintf("web-%d", i), UID: uid(i)}
}

func uid(i int) drain.UID { return drain.UID(fmt.Sprintf("uid-%06d", i)) }

func uids(exclusions []Exclusion) (all []drain.UID) {
	for _, s := range exclusions {
		all = append(all, s.Pod.UID)
	}
	return all
}

// left reads what an agent that starts now would find.
func left(t testing.TB, dir string) []Exclusion {
	t.Helper()
	data, err := read(filepath.Join(dir, fileName))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	b, err := decode(data, time.Now(), stampNow())
	if err != nil {
		t.Fatalf("the file that is left cannot be read: %v\n%s", err, data)
	}
	return b.exclusions()
}

func mustSync(t testing.TB, j *Journal) {
	t.Helper()
	if err := j.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestWhatIsSyncedIsThereAfterRestart(t *testing.T) {
	dir := t.TempDir()
	j, stop := open(t, dir)
	now := time.Now()
	since := now.Add(-5 * time.Second)
	j.Exclude(now, pod(1), "a/1", since, now.Add(time.Minute))
	j.Exclude(now, pod(1), "b/1", since.Add(-time.Second), now.Add(time.Minute))
	j.Exclude(now, pod(2), "a/1", since, now.Add(time.Minute))
	j.Exclude(now, pod(3), "a/1", since, now.Add(time.Minute))
	mustSync(t, j)
	for i := 1; i <= 3; i++ {
		if !j.Settled(uid(i)) {
			t.Errorf("pod %d is not settled after Sync", i)
		}
	}
	j.Readmit(uid(2), "a/1")
	j.Terminate(now, uid(3))
	j.Readmit(uid(3), "a/1")
	j.Readmit(uid(3), "nobody/1")
	want := j.Exclusions()
	stop()

	again, _ := open(t, dir)
	got := again.Exclusions()
	if diff := cmp.Diff(uids(want), uids(got)); diff != "" {
		t.Fatalf("after restart (-before +after):\n%s", diff)
	}
	first := got[0]
	if first.Pod != pod(1) || !first.Since.Equal(since.Add(-time.Second).Round(0)) || first.Terminating ||
		len(first.Expiries) != 2 {
		t.Errorf("pod 1 is %+v", first)
	}
	for holder, expires := range first.Expiries {
		if in := expires.Sub(now); in < time.Minute || in > 90*time.Second+time.Second {
			t.Errorf("%s's expiry ends in %s, want a minute, and at most half as much more", holder, in)
		}
	}
	if last := got[1]; last.Pod != pod(3) || !last.Terminating || len(last.Expiries) != 0 {
		t.Errorf("pod 3 is %+v, want dead", last)
	}
}

func TestABurstIsNotAWriteEach(t *testing.T) {
	var writes atomic.Int32
	j, _ := open(t, t.TempDir(), func(j *Journal) {
		j.wrote = func(time.Duration, error) { writes.Add(1) }
		j.step = func(name string) error {
			if name == "sync" {
				time.Sleep(5 * time.Millisecond) // as slow as a disk, so that they meet
			}
			return nil
		}
	})
	now := time.Now()
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() {
			j.Exclude(now, pod(i), "a/1", now, now.Add(time.Minute))
			mustSync(t, j)
		})
	}
	wg.Wait()
	if n := writes.Load(); n > 5 {
		t.Errorf("100 exclusions at once cost %d writes", n)
	}
	if n := len(left(t, j.dir)); n != 100 {
		t.Errorf("%d of 100 are on disk", n)
	}
	// Ten thousand repeats are none.
	before := writes.Load()
	for i := range 10_000 {
		j.Exclude(now, pod(i%100), "a/1", now, now.Add(time.Minute))
		mustSync(t, j)
	}
	if n := writes.Load(); n != before {
		t.Errorf("repeats cost %d writes", n-before)
	}
}

// An hour of renewals, each 2 s, of 50 exclusions: what the disk says must never be less than the
// truth, never much more, and must not be written each time.
func TestRenewalsAreWrittenNowAndThen(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		var wrote atomic.Int32
		j, err := Open(t.Context(), dir, nil, quiet)
		if err != nil {
			t.Fatal(err)
		}
		j.wrote = func(time.Duration, error) { wrote.Add(1) }
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); _ = j.Run(ctx) }()
		began := time.Now()
		for i := range 50 {
			j.Exclude(began, pod(i), "a/1", began, began.Add(time.Minute))
		}
		mustSync(t, j)
		var in body
		for time.Since(began) < time.Hour {
			time.Sleep(2 * time.Second)
			expires := time.Now().Add(time.Minute)
			j.Renew(time.Now(), "a/1", expires)
			j.Renew(time.Now(), "b/1", expires)
			j.mu.Lock()
			in = j.book.body(time.Now(), stamp{Wall: time.Now()})
			j.mu.Unlock()
			ahead := in.Expiries["a/1"].Sub(expires)
			if ahead < 0 || ahead > 30*time.Second {
				t.Fatalf("the stored expiry ends %s after the true one", ahead)
			}
		}
		synctest.Wait()
		writes := wrote.Load()
		if writes > 3600/20+5 {
			t.Errorf("%d writes in an hour of renewals, want one each 20 s", writes)
		}
		if writes < 100 {
			t.Errorf("%d writes in an hour: the expiries on disk have lapsed", writes)
		}
		if exclusions := left(t, dir); len(exclusions) != 50 ||
			exclusions[0].Expiries["a/1"].Before(time.Now().Add(time.Minute-3*time.Second)) {
			t.Errorf("on disk are %d, the first is %+v", len(exclusions), exclusions[0])
		}
		cancel()
		<-ended
		j.Close()
	})
}

// What a file says of expiries is by the clock since boot where that goes on, and by the wall where
// it does not.
func TestClocksThatJump(t *testing.T) {
	wall := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	written := stamp{Wall: wall, Boot: "boot-1", SinceBoot: time.Hour}
	for name, c := range map[string]struct {
		at   stamp
		left time.Duration
	}{
		"10 s later": {stamp{wall.Add(10 * time.Second), "boot-1", time.Hour + 10*time.Second},
			80 * time.Second},
		"the wall has jumped a day ahead": {stamp{wall.Add(24 * time.Hour), "boot-1", time.Hour + 10*time.Second},
			80 * time.Second},
		"the wall has jumped a day back": {stamp{wall.Add(-24 * time.Hour), "boot-1", time.Hour + 10*time.Second},
			80 * time.Second},
		"over, by the clock since boot":      {stamp{wall, "boot-1", time.Hour + 100*time.Second}, -10 * time.Second},
		"another boot":                       {stamp{wall.Add(30 * time.Second), "boot-2", time.Second}, time.Minute},
		"another boot, and the wall is back": {stamp{wall.Add(-time.Hour), "boot-2", time.Second}, 90 * time.Second},
		"another boot, and a day has gone by": {stamp{wall.Add(24 * time.Hour), "boot-2", time.Second},
			90*time.Second - 24*time.Hour},
		"nobody knows the boot":             {stamp{Wall: wall.Add(30 * time.Second)}, time.Minute},
		"a clock since boot that went back": {stamp{wall, "boot-1", time.Minute}, 90 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			before := time.Now()
			b := newBook()
			b.exclude(before, pod(1), "a/1", before, before.Add(time.Minute)) // and half of it
			b.terminate(before, uid(2))
			data, err := b.body(before, written).encode()
			if err != nil {
				t.Fatal(err)
			}
			now := time.Now().Add(1000 * time.Hour) // this process's clock is of no account
			got, err := decode(data, now, c.at)
			if err != nil {
				t.Fatal(err)
			}
			exclusions := got.exclusions()
			if left := exclusions[0].Expiries["a/1"].Sub(now); left != c.left {
				t.Errorf("the expiry has %s left, want %s", left, c.left)
			}
			if dead := got.byUID[uid(2)].terminatingAt; dead.After(now) {
				t.Errorf("a pod died in the future: %s", dead.Sub(now))
			}
		})
	}
}

func TestEveryDamageIsFound(t *testing.T) {
	now, at := time.Now(), stampNow()
	b := newBook()
	for i := range 3 {
		b.exclude(now, pod(i), "a/1", now, now.Add(time.Minute))
	}
	data, err := b.body(now, at).encode()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := decode(data, now, at); err != nil {
		t.Fatalf("the whole file: %v", err)
	}
	for n := range data {
		if _, err := decode(data[:n], now, at); !errors.Is(err, errCorrupt) {
			t.Fatalf("the first %d of %d bytes: %v", n, len(data), err)
		}
		// A flipped bit in the head may make it another version, or spell a field that we do not
		// know.
		bad := slices.Clone(data)
		bad[n] ^= 1 << rand.N(8)
		if got, err := decode(bad, now, at); err == nil &&
			!cmp.Equal(got.exclusions(), b.exclusions(), cmpopts.EquateApproxTime(time.Minute)) {
			t.Fatalf("byte %d changed to %q: read as %+v", n, bad[n], got.exclusions())
		}
	}
}

func FuzzDecode(f *testing.F) {
	now, at := time.Now(), stampNow()
	b := newBook()
	b.exclude(now, pod(1), "a/1", now, now.Add(time.Minute))
	b.terminate(now, uid(2))
	good, err := b.body(now, at).encode()
	if err != nil {
		f.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(good), "\n")
	f.Add(rest)
	f.Add(`{"written":{},"exclusions":[{"uid":"x","holders":["a","a",""]},{"uid":"x","terminatingAt":"0001-01-01T00:00:00Z"}]}`)
	f.Add(`{"expiries":{"a":"9999-12-31T23:59:59Z"},"exclusions":[{"uid":"x","holders":["a"]}]}`)
	f.Fuzz(func(t *testing.T, rest string) {
		_, _ = decode([]byte(rest), now, at)
		file := fmt.Sprintf("{\"lameduckExclusions\":1,\"bytes\":%d,\"crc32c\":%d}\n%s", len(rest), sum(rest), rest)
		got, err := decode([]byte(file), now, at)
		if err != nil {
			return
		}
		// Whatever was read can be written, and says the same.
		data, err := got.body(now, at).encode()
		if err != nil {
			return // a year that JSON has no word for
		}
		again, err := decode(data, now, at)
		if err != nil {
			t.Fatalf("what was written cannot be read: %v", err)
		}
		if diff := cmp.Diff(uids(got.exclusions()), uids(again.exclusions())); diff != "" {
			t.Fatal(diff)
		}
		got.lapse(now.Add(time.Hour))
		got.prune(now.Add(time.Hour))
	})
}

func TestWhatCannotBeReadIsSetAside(t *testing.T) {
	for name, content := range map[string]string{
		"empty":           "",
		"torn":            `{"lameduckExclusions":1,"bytes":400,"crc32c":1}` + "\n{\"wri",
		"not ours":        "# comment\n",
		"a newer version": `{"lameduckExclusions":2,"words":"unknown"}` + "\nwho knows",
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, fileName)
			if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			j, err := Open(t.Context(), dir, nil, quiet)
			if err != nil {
				t.Fatal(err)
			}
			defer j.Close()
			if j.Err() == nil || len(j.Exclusions()) > 0 {
				t.Errorf("Err is %v, exclusions are %v", j.Err(), j.Exclusions())
			}
			if kept, _ := os.ReadFile(path + asideSuffix); string(kept) != content {
				t.Errorf("set aside is %q", kept)
			}
		})
	}
}

// The file of a later release of the same version may have more in it.
func TestMoreThanWeKnowIsNoDamage(t *testing.T) {
	rest := `{"written":{"wall":"2026-01-01T00:00:00Z","sun":"high"},"expiries":{"a/1":"2026-01-01T00:01:00Z"},` +
		`"exclusions":[{"namespace":"shop","name":"web-1","uid":"u","since":"2026-01-01T00:00:00Z","holders":["a/1"],"colour":"red"}],"more":1}`
	file := fmt.Sprintf("{\"lameduckExclusions\":1,\"bytes\":%d,\"crc32c\":%d,\"by\":\"later\"}\n%s", len(rest),
		sum(rest), rest)
	now := time.Now()
	b, err := decode([]byte(file), now, stamp{Wall: time.Date(2026, 1, 1, 0, 0, 10, 0, time.UTC)})
	if err != nil {
		t.Fatal(err)
	}
	if got := b.exclusions(); len(got) != 1 || got[0].Expiries["a/1"].Sub(now) != 50*time.Second {
		t.Errorf("read %+v", got)
	}
}

var steps = []string{"create", "write", "sync", "rename", "sync directory"}

var errDisk = errors.New("the disk says no")

// The agent dies before, in and after each step of a write. What was synced before must be there,
// and nothing else than what was excluded.
func TestDeathAtEachStep(t *testing.T) {
	for _, at := range steps {
		t.Run(at, func(t *testing.T) {
			dir := t.TempDir()
			dying := atomic.Bool{}
			dead := make(chan struct{})
			j, err := Open(t.Context(), dir, nil, quiet)
			if err != nil {
				t.Fatal(err)
			}
			var once sync.Once
			j.step = func(name string) error {
				if dying.Load() && name == at {
					if at == "write" || at == "sync" {
						_ = os.WriteFile(j.path()+newSuffix, []byte(`{"lameduckTom`), 0o600)
					}
					once.Do(func() { close(dead) })
					select {} // this process does nothing more
				}
				return nil
			}
			go func() { _ = j.Run(context.WithoutCancel(t.Context())) }()
			now := time.Now()
			j.Exclude(now, pod(1), "a/1", now, now.Add(time.Minute))
			mustSync(t, j)
			dying.Store(true)
			j.Exclude(now, pod(2), "a/1", now, now.Add(time.Minute))
			<-dead
			j.lock.Close() // as the kernel does

			again, _ := open(t, dir)
			got := uids(again.Exclusions())
			if !slices.Equal(got, []drain.UID{uid(1)}) && !slices.Equal(got, []drain.UID{uid(1), uid(2)}) {
				t.Errorf("left are %v", got)
			}
			if err := again.Err(); err != nil {
				t.Errorf("what is left is not whole: %v", err)
			}
			again.Exclude(now, pod(3), "a/1", now, now.Add(time.Minute))
			mustSync(t, again)
		})
	}
}

// A disk that fails stops nobody, is said, and is used again when it works.
func TestADiskThatFailsStopsNothing(t *testing.T) {
	for _, at := range steps {
		t.Run(at, func(t *testing.T) {
			var failing atomic.Bool
			dir := t.TempDir()
			j, _ := open(t, dir, func(j *Journal) {
				j.step = func(name string) error {
					if failing.Load() && name == at {
						return errDisk
					}
					return nil
				}
			})
			now := time.Now()
			j.Exclude(now, pod(1), "a/1", now, now.Add(time.Minute))
			mustSync(t, j)
			failing.Store(true)
			j.Exclude(now, pod(2), "a/1", now, now.Add(time.Minute))
			if err := j.Sync(t.Context()); !errors.Is(err, errDisk) {
				t.Fatalf("Sync returns %v", err)
			}
			if err := j.Sync(t.Context()); !errors.Is(err, errDisk) {
				t.Fatalf("the second Sync returns %v", err)
			}
			if !errors.Is(j.Err(), errDisk) || !j.Settled(uid(2)) {
				t.Errorf("Err is %v, settled %t", j.Err(), j.Settled(uid(2)))
			}
			if got := uids(left(t, dir)); !slices.Contains(got, uid(1)) {
				t.Errorf("what was on disk before is lost: %v", got)
			}
			failing.Store(false)
			j.Exclude(now, pod(3), "a/1", now, now.Add(time.Minute))
			mustSync(t, j)
			if got := uids(left(t, dir)); j.Err() != nil || !slices.Equal(got, []drain.UID{uid(1), uid(2), uid(3)}) {
				t.Errorf("Err is %v, on disk are %v", j.Err(), got)
			}
		})
	}
}

// It tries again by itself, not at every moment.
func TestAFailedWriteIsTriedAgain(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		var writes, works atomic.Int32
		j, err := Open(t.Context(), dir, nil, quiet)
		if err != nil {
			t.Fatal(err)
		}
		j.wrote = func(time.Duration, error) { writes.Add(1) }
		j.step = func(string) error {
			if works.Load() == 0 {
				return errDisk
			}
			return nil
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); _ = j.Run(ctx) }()
		j.Exclude(time.Now(), pod(1), "a/1", time.Now(), time.Now().Add(time.Minute))
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if writes := writes.Load(); writes < 10 || writes > 30 {
			t.Errorf("%d attempts in 10 min", writes)
		}
		works.Store(1)
		time.Sleep(maxRetry)
		synctest.Wait()
		if got := uids(left(t, dir)); j.Err() != nil || !slices.Equal(got, []drain.UID{uid(1)}) {
			t.Errorf("Err is %v, on disk are %v", j.Err(), got)
		}
		cancel()
		<-ended
		j.Close()
	})
}

// A write that does not return holds the first who waits for a second, and nobody after that.
func TestAStuckDiskHoldsNobodyForLong(t *testing.T) {
	release := make(chan struct{})
	var stuck atomic.Bool
	j, _ := open(t, t.TempDir(), func(j *Journal) {
		j.step = func(name string) error {
			if stuck.Load() && name == "sync" {
				<-release
			}
			return nil
		}
	})
	mustSync(t, j)
	stuck.Store(true)
	now := time.Now()
	j.Exclude(now, pod(1), "a/1", now, now.Add(time.Minute))
	if j.Settled(uid(1)) {
		t.Error("settled at once")
	}
	began := time.Now()
	if err := j.Sync(t.Context()); !errors.Is(err, errStuck) || time.Since(began) > 3*syncTimeout {
		t.Errorf("the first Sync returns %v after %s", err, time.Since(began))
	}
	for end := time.Now().Add(5 * time.Second); !errors.Is(j.Err(), errStuck); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("Err is %v", j.Err())
		}
	}
	j.Exclude(now, pod(2), "a/1", now, now.Add(time.Minute))
	began = time.Now()
	if err := j.Sync(t.Context()); !errors.Is(err, errStuck) || time.Since(began) > syncTimeout/2 {
		t.Errorf("the second Sync returns %v after %s", err, time.Since(began))
	}
	if !j.Settled(uid(1)) || !j.Settled(uid(2)) || !errors.Is(j.Err(), errStuck) {
		t.Errorf("settled %t, %t; Err is %v", j.Settled(uid(1)), j.Settled(uid(2)), j.Err())
	}
	stuck.Store(false)
	close(release)
	for end := time.Now().Add(5 * time.Second); j.Err() != nil; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(j.Err())
		}
	}
	mustSync(t, j)
}

func TestTwoAgentsDoNotShareADirectory(t *testing.T) {
	dir := t.TempDir()
	_, stop := open(t, dir)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := Open(ctx, dir, nil, quiet); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a second agent whose time is up gets %v", err)
	}
	// One that is dying lets go soon.
	go func() {
		time.Sleep(200 * time.Millisecond) // Open has tried in vain by then, many times
		stop()
	}()
	if j, err := Open(t.Context(), dir, nil, quiet); err != nil {
		t.Error(err)
	} else {
		defer j.Close()
	}
	if _, err := Open(t.Context(), dir, nil, quiet); !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), dir) {
		t.Errorf("a second agent gets %v, want ErrLocked and the directory", err)
	}
}

// The expiry of a restored holder goes on where its coordinator lives, and ends where not.
func TestRestoredLeases(t *testing.T) {
	now := time.Now()
	b := newBook()
	b.exclude(now, pod(1), "a/1", now, now.Add(time.Minute))
	b.exclude(now, pod(2), "b/1", now, now.Add(time.Minute))
	b.exclude(now, pod(2), "a/1", now, now.Add(time.Minute))
	b.exclude(now, pod(3), "b/1", now, now.Add(time.Minute))
	b.terminate(now, uid(3))
	at := stampNow()
	data, err := b.body(now, at).encode()
	if err != nil {
		t.Fatal(err)
	}
	got, err := decode(data, now, at)
	if err != nil {
		t.Fatal(err)
	}
	got.renew(now, "b/1", now.Add(3*time.Minute))
	after := now.Add(2 * time.Minute)
	if e := got.expired(after); !slices.Equal(e, []drain.UID{uid(1)}) {
		t.Errorf("expired are %v", e)
	}
	if e := got.lapse(after); !slices.Equal(e, []drain.UID{uid(1)}) {
		t.Errorf("lapsed are %v", e)
	}
	if e := got.lapse(after); len(e) != 0 {
		t.Errorf("lapsed again are %v", e)
	}
	if e := got.lapse(now.Add(4 * time.Minute)); !slices.Equal(e, []drain.UID{uid(2)}) {
		t.Errorf("lapsed are %v, want the one that lives", e)
	}
	if all := uids(got.exclusions()); !slices.Equal(all, []drain.UID{uid(3)}) || len(got.holders) != 0 {
		t.Errorf("left are %v, held by %v", all, got.holders)
	}
	got.prune(now.Add(terminatingMemory + time.Second))
	if all := uids(got.exclusions()); len(all) != 0 {
		t.Errorf("left are %v", all)
	}
}

func TestTheDeadAreBounded(t *testing.T) {
	b := newBook()
	now := time.Now()
	for i := range maxTerminating + 100 {
		b.terminate(now.Add(time.Duration(i)*time.Microsecond), uid(i))
	}
	b.exclude(now, pod(0), "a/1", now, now.Add(time.Minute))
	b.prune(now.Add(time.Second))
	if n := len(b.byUID); n != maxTerminating+1 {
		t.Errorf("%d are kept", n)
	}
	if b.byUID[uid(0)] == nil || b.byUID[uid(1)] != nil || b.byUID[uid(maxTerminating+99)] == nil {
		t.Error("not the oldest were forgotten, or one that is held")
	}
}

// buryForEver excludes one pod after the other, and prints the UID of each once it is on disk.
func buryForEver(dir string) error {
	j, err := Open(context.Background(), dir, nil, quiet)
	if err != nil {
		return err
	}
	go func() { _ = j.Run(context.Background()) }()
	for i := len(j.Exclusions()); ; i++ {
		now := time.Now()
		j.Exclude(now, pod(i), "a/1", now, now.Add(time.Hour))
		if err := j.Sync(context.Background()); err != nil {
			return err
		}
		fmt.Println(uid(i))
	}
}

// A real process, really killed, again and again on one directory: each UID that it has called safe
// is there.
func TestKilledAtRandomMoments(t *testing.T) {
	dir := t.TempDir()
	safe := map[drain.UID]bool{}
	for round := range 15 {
		cmd := child(t, "exclude", dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		if !lines.Scan() {
			t.Fatal("the child says nothing")
		}
		safe[drain.UID(lines.Text())] = true
		time.AfterFunc(rand.N(40*time.Millisecond), func() { _ = cmd.Process.Kill() })
		for lines.Scan() {
			if strings.HasPrefix(lines.Text(), "error") {
				t.Fatal(lines.Text())
			}
			safe[drain.UID(lines.Text())] = true
		}
		_ = cmd.Wait()
		have := uids(left(t, dir))
		for uid := range safe {
			if !slices.Contains(have, uid) {
				t.Fatalf("round %d: %s was on disk and is not", round, uid)
			}
		}
		if len(have) > len(safe)+round+1 {
			t.Fatalf("round %d: %d exclusions are left of %d", round, len(have), len(safe))
		}
	}
	t.Logf("%d exclusions, none lost", len(safe))
}

// onSmallDisk fills a disk of its own, makes it read-only, and sees what the journal does.
func onSmallDisk(dir string) error {
	if err := syscall.Mount("none", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		return err
	}
	ctx := context.Background()
	j, err := Open(ctx, dir, nil, quiet)
	if err != nil {
		return err
	}
	running, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error)
	go func() { ended <- j.Run(running) }()
	now := time.Now()
	exclude := func(i int) error {
		j.Exclude(now, pod(i), "a/1", now, now.Add(time.Hour))
		return j.Sync(ctx)
	}
	if err := exclude(1); err != nil {
		return fmt.Errorf("on an empty disk: %w", err)
	}
	filler := filepath.Join(dir, "filler")
	if err := os.WriteFile(filler, make([]byte, 1<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
		return fmt.Errorf("fill the disk: %w", err)
	}
	if err := exclude(2); !errors.Is(err, syscall.ENOSPC) {
		return fmt.Errorf("on a full disk: %v", err)
	}
	if data, err := read(j.path()); err != nil {
		return err
	} else if b, err := decode(data, now, stampNow()); err != nil || b.byUID[uid(1)] == nil {
		return fmt.Errorf("the old file is gone: %v", err)
	}
	if err := os.Remove(filler); err != nil {
		return err
	}
	if err := exclude(3); err != nil {
		return fmt.Errorf("with room again: %w", err)
	}
	if err := syscall.Mount("none", dir, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""); err != nil {
		return err
	}
	if err := exclude(4); !errors.Is(err, syscall.EROFS) {
		return fmt.Errorf("on a read-only disk: %v", err)
	}
	cancel()
	if err := <-ended; err != nil {
		return err
	}
	j.Close()
	// An agent that starts on it has what was written before, and says what is wrong.
	j, err = Open(ctx, dir, nil, quiet)
	if err != nil {
		return fmt.Errorf("open on a read-only disk: %w", err)
	}
	if got := uids(j.Exclusions()); !slices.Equal(got, []drain.UID{uid(1), uid(2), uid(3)}) {
		return fmt.Errorf("on the read-only disk are %v", got)
	}
	go func() { ended <- j.Run(ctx) }()
	if err := exclude(5); !errors.Is(err, syscall.EROFS) || !errors.Is(j.Err(), syscall.EROFS) {
		return fmt.Errorf("after a start on a read-only disk: %v", err)
	}
	return nil
}

func TestRealDiskThatIsFullOrReadOnly(t *testing.T) {
	cmd := child(t, "small disk", t.TempDir())
	cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS
	cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
	cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	if os.Getuid() == 0 {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWNS
		cmd.SysProcAttr.UidMappings, cmd.SysProcAttr.GidMappings = nil, nil
	}
	out, err := cmd.CombinedOutput()
	if errors.Is(err, syscall.EPERM) && os.Getenv("REQUIRE_REAL") != "1" && os.Getenv("CI") != "true" {
		t.Skipf("no user namespaces here, and not root: %v", err)
	}
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

func BenchmarkTenThousand(b *testing.B) {
	j, _ := open(b, b.TempDir())
	now := time.Now()
	for i := range 10_000 {
		j.Exclude(now, pod(i), "a/1", now, now.Add(time.Hour))
	}
	mustSync(b, j)
	for i := 0; b.Loop(); i++ {
		j.Exclude(now, pod(10_000+i), "a/1", now, now.Add(time.Hour))
		mustSync(b, j)
	}
}
