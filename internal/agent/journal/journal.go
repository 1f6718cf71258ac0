package journal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

const (
	fileName = "exclusions.json"
	lockName = "exclusions.lock"
	// newSuffix is on the file that is being written, asideSuffix on the last one that could not be
	// read.
	newSuffix   = ".new"
	asideSuffix = ".unreadable"

	// lockTimeout is how long Open waits for another agent to let go: one that is dying holds the
	// lock until it is dead.
	lockTimeout = 5 * time.Second
	// syncTimeout is how long anybody waits for one write: long for a disk, short against a drain's
	// deadline.
	syncTimeout = time.Second
	// lazy is how long what nobody waits for may wait to be written with other things.
	lazy = time.Second
	// retryFirst and maxRetry bound the pause after a write that has failed.
	retryFirst = time.Second
	maxRetry   = 30 * time.Second
)

// ErrLocked says that another agent uses the directory.
var ErrLocked = errors.New("another agent uses it")

// errStuck says that a write does not come to an end.
var errStuck = fmt.Errorf("a write has not ended within %s", syncTimeout)

// Journal is the exclusions of one agent, in memory and on disk. Make it with Open, run it with
// Run. Its other methods may be called from any goroutine; only Sync waits.
type Journal struct {
	// wrote is called after each attempt to write, from Run. It must not block. May be nil.
	wrote func(took time.Duration, err error)

	dir  string
	log  *slog.Logger
	lock *os.File
	// step is called before each step of a write, which fails if it does. Tests only.
	step func(name string) error

	mu   sync.Mutex
	book book
	// version counts the changes of the book. urgent is the last that somebody may wait for,
	// written the one that the disk has, and tried the one that the last attempt was about.
	version, urgent, written, tried uint64
	// began is when the attempt that runs began. The zero time: none runs.
	began time.Time
	err   error
	// attempted is closed, and replaced, after each attempt.
	attempted chan struct{}
	wake      chan struct{}
}

// Open reads the journal in dir, which must exist, and keeps other agents away from it until Close.
// An empty dir means that there is no disk: the journal is in memory only. The error is ErrLocked,
// or ctx's; whatever else is wrong with the disk is said in log and by Err, and stops nothing.
func Open(ctx context.Context, dir string, wrote func(took time.Duration, err error), log *slog.Logger) (*Journal,
	error) {
	j := &Journal{wrote: wrote, dir: dir, log: log, book: newBook(), attempted: make(chan struct{}),
		wake: make(chan struct{}, 1)}
	if dir == "" {
		return j, nil
	}
	var err error
	if j.lock, err = lock(ctx, filepath.Join(dir, lockName)); err != nil {
		if errors.Is(err, ErrLocked) || ctx.Err() != nil {
			return nil, fmt.Errorf("journal in %s: %w", dir, err)
		}
		log.Warn("journal cannot be locked: nothing keeps another agent away from it", "dir", dir, "error", err)
	}
	data, err := read(j.path())
	if err == nil {
		j.book, err = decode(data, time.Now(), stampNow())
	}
	switch {
	case err == nil:
		log.Info("journal read", "dir", dir, "exclusions", len(j.book.byUID))
	case errors.Is(err, fs.ErrNotExist):
		log.Info("journal is new", "dir", dir)
	default:
		j.book, j.err = newBook(), err
		aside := os.Rename(j.path(), j.path()+asideSuffix)
		log.Error("journal cannot be read: starting without the exclusions in it", "path", j.path(), "error", err,
			"setAside", aside == nil)
	}
	// The first write shows at once whether the disk takes one.
	j.version, j.urgent = 1, 1
	poke(j.wake)
	return j, nil
}

// Close lets other agents use the directory. Call it after Run has returned.
func (j *Journal) Close() {
	if j.lock != nil {
		_ = j.lock.Close()
	}
}

// Exclusions lists all that the journal holds, sorted by UID.
func (j *Journal) Exclusions() []Exclusion {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.book.exclusions()
}

// Exclude records an exclusion of holder on pod, or renews all of holder's expiries. The oldest
// since of all holders is kept. A repeat costs no write.
func (j *Journal) Exclude(now time.Time, pod drain.Pod, holder string, since, expires time.Time) {
	j.mu.Lock()
	defer j.mu.Unlock()
	added, changed := j.book.exclude(now, pod, holder, since, expires)
	j.change(changed)
	if added {
		j.book.byUID[pod.UID].added, j.urgent = j.version, j.version
	}
}

// Renew extends all of holder's expiries until expires at least.
func (j *Journal) Renew(now time.Time, holder string, expires time.Time) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.change(j.book.renew(now, holder, expires))
}

// Readmit records that holder's expiry on uid has ended.
func (j *Journal) Readmit(uid drain.UID, holder string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.change(j.book.readmit(uid, holder))
}

// Terminate records that the pod is terminating or gone. It is remembered for drain.Times.Memory,
// expiries or not.
func (j *Journal) Terminate(now time.Time, uid drain.UID) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.change(j.book.terminate(now, uid))
}

// Lapse ends every expiry that is over at now, and returns the UIDs of living pods whose last one
// ended, sorted.
func (j *Journal) Lapse(now time.Time) []drain.UID {
	j.mu.Lock()
	defer j.mu.Unlock()
	before := len(j.book.holders)
	uids := j.book.lapse(now)
	j.change(len(j.book.holders) != before)
	return uids
}

// Expired lists the UIDs that Lapse would return, and changes nothing.
func (j *Journal) Expired(now time.Time) []drain.UID {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.book.expired(now)
}

// change, called with the lock, notes that the disk must follow.
func (j *Journal) change(changed bool) {
	if changed && j.dir != "" {
		j.version++
		poke(j.wake)
	}
}

// Sync waits until the exclusions that were excluded before the call are on disk. An error says
// that they are not, and that the caller should go on without: the attempt that had them failed, or
// a write does not come to an end.
func (j *Journal) Sync(ctx context.Context) error {
	timer := time.NewTimer(syncTimeout)
	defer timer.Stop()
	j.mu.Lock()
	want := j.urgent
	for {
		switch {
		case j.written >= want:
			j.mu.Unlock()
			return nil
		case j.tried >= want:
			defer j.mu.Unlock()
			return j.err
		case j.stuck():
			j.mu.Unlock()
			return errStuck
		}
		attempted := j.attempted
		j.mu.Unlock()
		select {
		case <-attempted:
		case <-timer.C:
			return errStuck
		case <-ctx.Done():
			return ctx.Err()
		}
		j.mu.Lock()
	}
}

// Settled reports whether the exclusion of uid is on disk, or will not be for now: whether it is as
// safe as it can be.
func (j *Journal) Settled(uid drain.UID) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	s := j.book.byUID[uid]
	return s == nil || j.dir == "" || max(j.written, j.tried) >= s.added || j.stuck()
}

// Err says what is wrong with the disk: why the last attempt to write failed, or the reading of
// what an earlier agent left. Nil: nothing is.
func (j *Journal) Err() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.stuck() {
		return errStuck
	}
	return j.err
}

func (j *Journal) stuck() bool { return !j.began.IsZero() && time.Since(j.began) > syncTimeout }

// Run writes what has changed until ctx is done, and then once more what nobody has waited for. It
// cannot end while the kernel does not return from a write.
func (j *Journal) Run(ctx context.Context) error {
	if j.dir == "" {
		<-ctx.Done()
		return nil
	}
	var dirtySince, retryAt time.Time
	retry, failing := retryFirst, ""
	for {
		dirty, urgent := j.due()
		now := time.Now()
		if !dirty {
			dirtySince = time.Time{}
		} else if dirtySince.IsZero() {
			dirtySince = now
		}
		last := ctx.Err() != nil
		if last && !dirty {
			return nil
		}
		if !last && !urgent {
			var at time.Time // the zero time: nothing is to be written
			if dirty {
				at = later(dirtySince.Add(lazy), retryAt)
			}
			if at.IsZero() || now.Before(at) {
				j.sleep(ctx, now, at)
				continue
			}
		}
		err := j.write(now)
		dirtySince, retryAt = time.Time{}, time.Time{}
		if err != nil {
			retryAt = time.Now().Add(retry)
			retry = min(2*retry, maxRetry)
		} else {
			retry = retryFirst
		}
		failing = j.report(err, failing)
		if last {
			return nil
		}
	}
}

// report logs what has changed since the error that was last reported, and returns what is now.
func (j *Journal) report(err error, failing string) string {
	text := ""
	if err != nil {
		text = err.Error()
	}
	switch {
	case text == failing:
	case err != nil:
		j.log.Error("journal cannot be written: going on without; exclusions are forgotten if the agent dies",
			"dir", j.dir, "error", err)
	default:
		j.log.Info("journal is written again", "dir", j.dir)
	}
	return text
}

// due says whether there is something to write, and whether somebody may wait for it whom no
// attempt has tried to serve.
func (j *Journal) due() (dirty, urgent bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.version > j.written, j.urgent > j.tried
}

// sleep waits until at, the next change, or the end. The zero time never comes.
func (j *Journal) sleep(ctx context.Context, now, at time.Time) {
	var timeUp <-chan time.Time
	if !at.IsZero() {
		timer := time.NewTimer(at.Sub(now))
		defer timer.Stop()
		timeUp = timer.C
	}
	select {
	case <-j.wake:
	case <-timeUp:
	case <-ctx.Done():
	}
}

// write makes one attempt to bring the book to the disk.
func (j *Journal) write(now time.Time) error {
	j.mu.Lock()
	j.book.prune(now)
	version, content := j.version, j.book.body(now, stampNow())
	j.began = time.Now()
	j.mu.Unlock()

	data, err := content.encode()
	if err == nil {
		err = j.replace(data)
	}
	took := time.Since(now)

	j.mu.Lock()
	j.tried, j.began, j.err = version, time.Time{}, err
	if err == nil {
		j.written = version
	}
	close(j.attempted)
	j.attempted = make(chan struct{})
	j.mu.Unlock()
	if j.wrote != nil {
		j.wrote(took, err)
	}
	return err
}

func (j *Journal) path() string { return filepath.Join(j.dir, fileName) }

// replace puts data in the place of the file: whole or not at all, and to stay once it returns nil.
func (j *Journal) replace(data []byte) (err error) {
	step := func(name string, do func() error) {
		if err == nil && j.step != nil {
			err = j.step(name)
		}
		if err == nil {
			err = do()
		}
	}
	path := j.path() + newSuffix
	var f *os.File
	step("create", func() (err error) {
		// Not the file of an attempt before: after a failed sync nobody knows what of it is on the
		// disk.
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		f, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		return err
	})
	if f == nil {
		return err
	}
	step("write", func() error { _, err := f.Write(data); return err })
	step("sync", f.Sync)
	if closed := f.Close(); err == nil {
		err = closed
	}
	step("rename", func() error { return os.Rename(path, j.path()) })
	step("sync directory", func() error { return syncDirectory(j.dir) })
	return err
}

// syncDirectory makes the names in a directory last.
func syncDirectory(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// read reads a file of at most maxFile bytes.
func read(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(data) > maxFile {
		err = fmt.Errorf("%w: larger than %d bytes", errCorrupt, maxFile)
	}
	return data, err
}

// lock takes the lock that ends with the process, however that ends. On a disk that is read-only
// the file must be there already.
func lock(ctx context.Context, path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE, 0o600)
	if err != nil {
		if f, err = os.Open(path); err != nil {
			return nil, err
		}
	}
	for end := time.Now().Add(lockTimeout); ; {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return f, nil
		}
		again := errors.Is(err, syscall.EWOULDBLOCK) || errors.Is(err, syscall.EINTR)
		if again && time.Now().Before(end) {
			select {
			case <-time.After(50 * time.Millisecond):
				continue
			case <-ctx.Done():
				err = ctx.Err()
			}
		} else if again {
			err = ErrLocked
		}
		_ = f.Close()
		return nil, err
	}
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
