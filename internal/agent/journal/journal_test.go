package journal

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
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

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// roles are what a child of this test program does instead of testing.
var roles = map[string]func(dir string) error{"exclude": excludeForever, "small disk": onSmallDisk}

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
	data, err := folder(dir).Read()
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	return read(t, data, time.Now(), stampNow()).Exclusions()
}

func empty() *Journal { return On(nil, time.Now(), Stamp{}, nil, quiet) }

// read decodes a file that must be whole.
func read(t testing.TB, data []byte, now time.Time, at Stamp) *Journal {
	t.Helper()
	j := empty()
	if err := j.decode(data, now, at); err != nil {
		t.Fatalf("cannot be read: %v\n%s", err, data)
	}
	return j
}

func file(t testing.TB, j *Journal, now time.Time, at Stamp) []byte {
	t.Helper()
	data, err := j.content(now, at).encode()
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// faulty is a folder in which something may happen before each write.
type faulty struct {
	folder
	before func() error
}

func (f *faulty) Replace(data []byte) error {
	if err := f.before(); err != nil {
		return err
	}
	return f.folder.Replace(data)
}

// with puts before in front of each write of a journal in dir.
func with(dir string, before func() error) func(*Journal) {
	return func(j *Journal) { j.disk = &faulty{folder(dir), before} }
}

func mustSync(t testing.TB, j *Journal) {
	t.Helper()
	if err := synced(j); err != nil {
		t.Fatal(err)
	}
}

// synced is Sync on a real disk, which may be slow for some time.
func synced(j *Journal) error {
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		if err := j.Sync(); !errors.Is(err, errStuck) || time.Now().After(end) {
			return err
		}
	}
}

// again returns what Sync returns, and how quickly it does once in three times.
func again(j *Journal) (took time.Duration, err error) {
	took = time.Hour
	for range 3 {
		began := time.Now()
		err = j.Sync()
		took = min(took, time.Since(began))
	}
	return took, err
}

func TestWhatIsSyncedIsThereAfterRestart(t *testing.T) {
	dir := t.TempDir()
	j, stop := open(t, dir)
	now := time.Now()
	since := now.Add(-5 * time.Second)
	j.Exclude(pod(1), "a/1", since, now.Add(time.Minute))
	j.Exclude(pod(1), "b/1", since.Add(-time.Second), now.Add(time.Minute))
	j.Exclude(pod(2), "a/1", since, now.Add(time.Minute))
	j.Exclude(pod(3), "a/1", since, now.Add(time.Minute))
	mustSync(t, j)
	for i := 1; i <= 3; i++ {
		if !j.Settled(time.Now(), uid(i)) {
			t.Errorf("pod %d is not settled after Sync", i)
		}
	}
	j.Readmit(uid(2), "a/1")
	j.Terminate(now, uid(3))
	j.Readmit(uid(3), "a/1")
	j.Readmit(uid(3), "unknown/1")
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
		if in := expires.Sub(now); in < 59*time.Second || in > time.Minute+50*time.Millisecond {
			t.Errorf("%s's expiry ends in %s, want a minute", holder, in)
		}
	}
	if last := got[1]; last.Pod != pod(3) || !last.Terminating || len(last.Expiries) != 0 {
		t.Errorf("pod 3 is %+v, want dead", last)
	}
}

func TestABurstIsNotAWriteEach(t *testing.T) {
	var writes atomic.Int32
	dir := t.TempDir()
	var excluded sync.WaitGroup
	excluded.Add(100)
	j, _ := open(t, dir, with(dir, func() error {
		writes.Add(1)
		excluded.Wait() // as slow as a disk, so that they meet
		return nil
	}))
	now := time.Now()
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() {
			j.Exclude(pod(i), "a/1", now, now.Add(time.Minute))
			excluded.Done()
			mustSync(t, j)
		})
	}
	wg.Wait()
	if n := writes.Load(); n > 5 {
		t.Errorf("100 exclusions at once cost %d writes", n)
	}
	if n := len(left(t, dir)); n != 100 {
		t.Errorf("%d of 100 are in the file", n)
	}
	// Ten thousand repeats are none.
	before := writes.Load()
	for i := range 10_000 {
		j.Exclude(pod(i%100), "a/1", now, now.Add(time.Minute))
		mustSync(t, j)
	}
	if n := writes.Load(); n != before {
		t.Errorf("repeats cost %d writes", n-before)
	}
}

// What no caller waits for is in the file within a second: an expiry that is renewed each 2 s is
// never more than that behind, and one that is not renewed costs nothing.
func TestRenewalsAreWrittenWithinASecond(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		var writes atomic.Int32
		j, stop := open(t, dir, with(dir, func() error { writes.Add(1); return nil }))
		j.Exclude(pod(0), "a/1", time.Now(), time.Now().Add(time.Minute))
		for range 100 {
			time.Sleep(2 * time.Second)
			expires := time.Now().Add(time.Minute)
			j.Renew("a/1", expires)
			j.Renew("b/1", expires)
			time.Sleep(time.Second + time.Millisecond)
			synctest.Wait()
			var c content
			if data, err := folder(dir).Read(); err != nil {
				t.Fatal(err)
			} else if err := json.Unmarshal(data, &c); err != nil {
				t.Fatal(err)
			}
			if got := c.Expiries["a/1"]; got < 59*time.Second || len(c.Expiries) != 1 {
				t.Fatalf("the file has %v", c.Expiries)
			}
		}
		before := writes.Load()
		time.Sleep(time.Hour)
		synctest.Wait()
		if now := writes.Load(); before > 102 || now != before {
			t.Errorf("%d writes for 100 renewals, and %d in an hour without one", before, now-before)
		}
		stop()
	})
}

// What a file says of expiries is by the clock since boot, whatever the wall clock does, and holds
// in that boot only.
func TestAFileIsOfOneBoot(t *testing.T) {
	written := Stamp{"boot-1", time.Hour}
	before := time.Now()
	j := empty()
	j.Exclude(pod(1), "a/1", before, before.Add(time.Minute))
	j.Terminate(before, uid(2))
	data := file(t, j, before, written)
	now := time.Now().Add(1000 * time.Hour) // this process's clock is of no account
	for name, c := range map[string]struct {
		at   Stamp
		left time.Duration
	}{
		"10 s later":             {Stamp{"boot-1", time.Hour + 10*time.Second}, 50 * time.Second},
		"over":                   {Stamp{"boot-1", time.Hour + 100*time.Second}, -40 * time.Second},
		"a clock that went back": {Stamp{"boot-1", time.Minute}, time.Minute},
	} {
		got := read(t, data, now, c.at)
		if left := got.Exclusions()[0].Expiries["a/1"].Sub(now); left != c.left {
			t.Errorf("%s: the expiry has %s left, want %s", name, left, c.left)
		}
		if dead := got.byUID[uid(2)].terminatingAt; dead.After(now) {
			t.Errorf("%s: a pod died in the future: %s", name, dead.Sub(now))
		}
	}
	for _, boot := range []string{"boot-2", ""} {
		j := empty()
		if err := j.decode(data, now, Stamp{boot, time.Hour}); !errors.Is(err, errBoot) || len(j.byUID) > 0 {
			t.Errorf("in boot %q: %v, %v", boot, err, j.byUID)
		}
	}
}

func FuzzDecode(f *testing.F) {
	now, at := time.Now(), Stamp{"boot", time.Hour}
	j := empty()
	j.Exclude(pod(1), "a/1", now, now.Add(time.Minute))
	j.Terminate(now, uid(2))
	f.Add(file(f, j, now, at))
	f.Add([]byte(`{"lameduckExclusions":2,"written":{"boot":"boot"},"exclusions":[{"uid":"x","holders":["a","a",""]},` +
		`{"uid":"x","terminating":0}]}`))
	f.Add([]byte(`{"lameduckExclusions":2,"written":{"boot":"boot"},"expiries":{"a":9223372036854775807},` +
		`"exclusions":[{"uid":"x","holders":["a"]}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		got := empty()
		if err := got.decode(data, now, at); err != nil {
			if len(got.byUID)+len(got.expiries) > 0 {
				t.Fatalf("%v, and %v is taken over", err, got.byUID)
			}
			return
		}
		// Whatever was read can be written, and says the same.
		data, err := got.content(now, at).encode()
		if err != nil {
			return // a year that JSON has no word for
		}
		again := read(t, data, now, at)
		if diff := cmp.Diff(uids(got.Exclusions()), uids(again.Exclusions())); diff != "" {
			t.Fatal(diff)
		}
		got.Lapse(now.Add(time.Hour))
		got.prune(now.Add(time.Hour))
	})
}

func TestWhatCannotBeReadIsSetAside(t *testing.T) {
	for name, content := range map[string]string{
		"empty":           "",
		"torn":            `{"lameduckExclusions":2,"wri`,
		"not ours":        "# comment\n",
		"a newer version": `{"lameduckExclusions":3,"words":"unknown"}`,
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
	data := `{"lameduckExclusions":2,"written":{"boot":"b","at":1000000000,"sun":"high"},"expiries":{"a/1":60000000000},` +
		`"exclusions":[{"namespace":"shop","name":"web-1","uid":"u","holders":["a/1"],"colour":"red"}],"more":1}`
	now := time.Now()
	got := read(t, []byte(data), now, Stamp{"b", 11 * time.Second}).Exclusions()
	if len(got) != 1 || got[0].Expiries["a/1"].Sub(now) != 50*time.Second {
		t.Errorf("read %+v", got)
	}
}

var errDisk = errors.New("the disk says no")

// A disk that fails stops nothing, is said, and is used again when it works.
func TestADiskThatFailsStopsNothing(t *testing.T) {
	var failing atomic.Bool
	dir := t.TempDir()
	j, _ := open(t, dir, with(dir, func() error {
		if failing.Load() {
			return errDisk
		}
		return nil
	}))
	now := time.Now()
	j.Exclude(pod(1), "a/1", now, now.Add(time.Minute))
	mustSync(t, j)
	failing.Store(true)
	j.Exclude(pod(2), "a/1", now, now.Add(time.Minute))
	for range 2 {
		if err := j.Sync(); !errors.Is(err, errDisk) {
			t.Fatalf("Sync returns %v", err)
		}
	}
	if !errors.Is(j.Err(), errDisk) || !j.Settled(time.Now(), uid(2)) {
		t.Errorf("Err is %v, settled %t", j.Err(), j.Settled(time.Now(), uid(2)))
	}
	if got := uids(left(t, dir)); !slices.Equal(got, []drain.UID{uid(1)}) {
		t.Errorf("in the file are %v", got)
	}
	failing.Store(false)
	j.Exclude(pod(3), "a/1", now, now.Add(time.Minute))
	mustSync(t, j)
	if got := uids(left(t, dir)); j.Err() != nil || !slices.Equal(got, []drain.UID{uid(1), uid(2), uid(3)}) {
		t.Errorf("Err is %v, in the file are %v", j.Err(), got)
	}
}

// It tries again by itself, once a second, and says the same only once.
func TestAFailedWriteIsTriedAgain(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		var writes, works atomic.Int32
		var log bytes.Buffer
		j, stop := open(t, dir, with(dir, func() error {
			if writes.Add(1); works.Load() == 0 {
				return errDisk
			}
			return nil
		}), func(j *Journal) { j.log = slog.New(slog.NewTextHandler(&log, nil)) })
		j.Exclude(pod(1), "a/1", time.Now(), time.Now().Add(time.Minute))
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if writes := writes.Load(); writes < 500 || writes > 605 {
			t.Errorf("%d attempts in 10 min", writes)
		}
		works.Store(1)
		time.Sleep(2 * writeEvery)
		synctest.Wait()
		if got := uids(left(t, dir)); j.Err() != nil || !slices.Equal(got, []drain.UID{uid(1)}) {
			t.Errorf("Err is %v, in the file are %v", j.Err(), got)
		}
		stop()
		if n := strings.Count(log.String(), "\n"); n != 2 {
			t.Errorf("%d lines of log, want that it fails and that it works again:\n%s", n, &log)
		}
	})
}

// A write that does not return holds the first caller for a second, and none after that.
func TestAStuckDiskHoldsNobodyForLong(t *testing.T) {
	release := make(chan struct{})
	var stuck atomic.Bool
	dir := t.TempDir()
	j, _ := open(t, dir, with(dir, func() error {
		if stuck.Load() {
			<-release
		}
		return nil
	}))
	mustSync(t, j)
	stuck.Store(true)
	now := time.Now()
	j.Exclude(pod(1), "a/1", now, now.Add(time.Minute))
	if j.Settled(time.Now(), uid(1)) {
		t.Error("settled at once")
	}
	began := time.Now()
	if err := j.Sync(); !errors.Is(err, errStuck) || time.Since(began) > 20*SyncTimeout {
		t.Errorf("the first Sync returns %v after %s", err, time.Since(began))
	}
	for end := time.Now().Add(5 * time.Second); !errors.Is(j.Err(), errStuck); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("Err is %v", j.Err())
		}
	}
	j.Exclude(pod(2), "a/1", now, now.Add(time.Minute))
	if took, err := again(j); !errors.Is(err, errStuck) || took > SyncTimeout/2 {
		t.Errorf("the second Sync returns %v after %s", err, took)
	}
	if !j.Settled(time.Now(), uid(1)) || !j.Settled(time.Now(), uid(2)) || !errors.Is(j.Err(), errStuck) {
		t.Errorf("settled %t, %t; Err is %v", j.Settled(time.Now(), uid(1)), j.Settled(time.Now(), uid(2)), j.Err())
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
func TestRestoredExpiries(t *testing.T) {
	now := time.Now()
	j := empty()
	j.Exclude(pod(1), "a/1", now, now.Add(time.Minute))
	j.Exclude(pod(2), "b/1", now, now.Add(time.Minute))
	j.Exclude(pod(2), "a/1", now, now.Add(time.Minute))
	j.Exclude(pod(3), "b/1", now, now.Add(time.Minute))
	j.Terminate(now, uid(3))
	at := Stamp{"boot", time.Hour}
	got := read(t, file(t, j, now, at), now, at)
	got.Renew("b/1", now.Add(3*time.Minute))
	after := now.Add(2 * time.Minute)
	if e := got.Expired(after); !slices.Equal(e, []drain.UID{uid(1)}) {
		t.Errorf("expired are %v", e)
	}
	got.Lapse(after)
	if all := uids(got.Exclusions()); !slices.Equal(all, []drain.UID{uid(2), uid(3)}) {
		t.Errorf("after the first lapse there are %v", all)
	}
	if e := got.Expired(after); len(e) != 0 {
		t.Errorf("expired again are %v", e)
	}
	last := now.Add(4 * time.Minute)
	if e := got.Expired(last); !slices.Equal(e, []drain.UID{uid(2)}) {
		t.Errorf("expired are %v, want the one that lives", e)
	}
	got.Lapse(last)
	if all := uids(got.Exclusions()); !slices.Equal(all, []drain.UID{uid(3)}) {
		t.Errorf("left are %v", all)
	}
	got.prune(now.Add(terminatingMemory + time.Second))
	if len(got.expiries) != 0 {
		t.Errorf("%v are kept, and hold nothing", got.expiries)
	}
	if all := uids(got.Exclusions()); len(all) != 0 {
		t.Errorf("left are %v", all)
	}
}

func TestTheDeadAreBounded(t *testing.T) {
	j := empty()
	now := time.Now()
	for i := range maxTerminating + 100 {
		j.Terminate(now.Add(time.Duration(i)*time.Microsecond), uid(i))
	}
	j.Exclude(pod(0), "a/1", now, now.Add(time.Minute))
	j.prune(now.Add(time.Second))
	if n := len(j.byUID); n != maxTerminating+1 {
		t.Errorf("%d are kept", n)
	}
	if j.byUID[uid(0)] == nil || j.byUID[uid(1)] != nil || j.byUID[uid(maxTerminating+99)] == nil {
		t.Error("not the oldest were forgotten, or one that is held")
	}
}

// excludeForever excludes one pod after the other, and prints the UID of each once it is in the
// file.
func excludeForever(dir string) error {
	j, err := Open(context.Background(), dir, nil, quiet)
	if err != nil {
		return err
	}
	go func() { _ = j.Run(context.Background()) }()
	for i := len(j.Exclusions()); ; i++ {
		now := time.Now()
		j.Exclude(pod(i), "a/1", now, now.Add(time.Hour))
		if err := synced(j); err != nil {
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
		j.Exclude(pod(i), "a/1", now, now.Add(time.Hour))
		return synced(j)
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
	if data, err := j.disk.Read(); err != nil {
		return err
	} else if b := empty(); b.decode(data, now, stampNow()) != nil || b.byUID[uid(1)] == nil {
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
		j.Exclude(pod(i), "a/1", now, now.Add(time.Hour))
	}
	mustSync(b, j)
	for i := 0; b.Loop(); i++ {
		j.Exclude(pod(10_000+i), "a/1", now, now.Add(time.Hour))
		mustSync(b, j)
	}
}

// An agent that dies again and again makes no expiry longer by that.
func TestRestartsDoNotLengthenAnExpiry(t *testing.T) {
	began := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	at := func(now time.Time) Stamp { return Stamp{"boot", now.Sub(began)} }
	now, j := began, empty()
	j.Exclude(pod(1), "r/1", began, began.Add(time.Minute))
	for range 10 {
		data := file(t, j, now, at(now))
		now = now.Add(time.Second)
		j = read(t, data, now, at(now))
		if got := j.Exclusions()[0].Expiries["r/1"]; !got.Equal(began.Add(time.Minute)) {
			t.Fatalf("%s after the start it ends at %s", now.Sub(began), got.Sub(began))
		}
	}
}

// An exclusion that comes while a write is under way is not in that.
func TestAnExclusionDuringAWriteIsNotSettled(t *testing.T) {
	dir := t.TempDir()
	j := On(folder(dir), time.Now(), stampNow(), nil, quiet)
	now := time.Now()
	with(dir, func() error { j.Exclude(pod(2), "a/1", now, now.Add(time.Minute)); return nil })(j)
	j.Exclude(pod(1), "a/1", now, now.Add(time.Minute))
	mustSync(t, j)
	if !j.Settled(time.Now(), uid(1)) || j.Settled(time.Now(), uid(2)) {
		t.Errorf("settled %t, %t, want only the first", j.Settled(time.Now(), uid(1)), j.Settled(time.Now(), uid(2)))
	}
}

// A write that hangs while the agent ends would replace the file of its successor.
func TestTheLockOutlivesAStuckWrite(t *testing.T) {
	dir := t.TempDir()
	release, entered := make(chan struct{}), make(chan struct{}, 9)
	j, stop := open(t, dir, with(dir, func() error { entered <- struct{}{}; <-release; return nil }))
	defer func() {
		close(release)
		j.writing.Lock() // the write ends before its directory is removed
	}()
	j.Exclude(pod(1), "a/1", time.Now(), time.Now().Add(time.Minute))
	<-entered
	stop()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if next, err := Open(ctx, dir, nil, quiet); err == nil {
		next.Close()
		t.Error("a successor opens the journal while a write is under way")
	}
}

func TestInMemoryTheDeadAreForgottenToo(t *testing.T) {
	j := empty()
	j.Terminate(time.Now(), uid(1))
	j.Lapse(time.Now().Add(terminatingMemory + time.Second))
	if all := j.Exclusions(); len(all) > 0 {
		t.Errorf("kept are %v", all)
	}
}

// A log that blocks is not a disk that does, and collects no goroutines.
func TestALogThatBlocksHoldsNoWrite(t *testing.T) {
	dir := t.TempDir()
	j := On(folder(dir), time.Now(), stampNow(), nil, quiet)
	j.log = slog.New(blocked{slog.DiscardHandler})
	with(dir, func() error { return errDisk })(j)
	go func() { _ = j.Sync() }()
	for end := time.Now().Add(5 * time.Second); j.Err() == nil; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the write does not fail")
		}
	}
	if took, err := again(j); !errors.Is(err, errDisk) || took > SyncTimeout/2 {
		t.Errorf("the next Sync returns %v after %s", err, took)
	}
}

type blocked struct{ slog.Handler }

func (b blocked) Enabled(context.Context, slog.Level) bool { return true }

func (b blocked) Handle(context.Context, slog.Record) error { select {} }
