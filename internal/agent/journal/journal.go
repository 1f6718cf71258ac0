package journal

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

const (
	// SyncTimeout is how long a caller waits for one write: long for a disk, short against a
	// drain's deadline.
	SyncTimeout = time.Second
	// writeEvery is how often that is written for which no caller waits, and what could not be.
	writeEvery = time.Second
	// maxTerminating bounds how many dead pods are kept that are not excluded. A cluster that
	// deletes more of them in drain.Times.Memory forgets the oldest here; its EndpointSlices have
	// had the time to say so themselves.
	maxTerminating = 10_000
)

// terminatingMemory is how long a dead pod is kept: as long as the ledger remembers it.
var terminatingMemory = drain.DefaultTimes().Memory

// ErrLocked says that another agent uses the directory.
var ErrLocked = errors.New("another agent uses it")

// errStuck says that a write does not come to an end.
var errStuck = fmt.Errorf("a write has not ended within %s", SyncTimeout)

// Disk is where a journal is kept.
type Disk interface {
	// Read returns what is there. The error is [fs.ErrNotExist] if nothing is.
	Read() ([]byte, error)
	// SetAside keeps what cannot be read under another name.
	SetAside() error
	// Replace puts data in the place of what is there, whole or not at all.
	Replace(data []byte) error
}

// Exclusion is what the journal knows of one.
type Exclusion struct {
	Pod drain.Pod
	// Since is the oldest start that any holder gave for the drain. The zero time: only that the
	// pod is dead was ever said.
	Since time.Time
	// Expiries says until when each holder's expiry stands. After Open that may be over: ending it
	// is for the caller, whose rules want more than time.
	Expiries map[string]time.Time
	// Terminating reports whether the pod was seen terminating or deleted.
	Terminating bool
}

// exclusion is what is kept of one. Neither dead nor held: there is none.
type exclusion struct {
	pod     drain.Pod
	since   time.Time
	holders map[string]bool
	// terminatingAt is when the pod was first said to be dead. The zero time: it lives.
	terminatingAt time.Time
	// added is the version in which a holder was last added: what must be in the file before the
	// gateway is touched.
	added uint64
}

// Journal is the exclusions of one agent, in memory and in a file. Its methods may be called from
// any goroutine.
type Journal struct {
	// wrote is called after each attempt to write. It must not block. May be nil.
	wrote func(error)
	// disk is nil if the journal is in memory only.
	disk Disk
	log  *slog.Logger
	lock *os.File
	wake chan struct{}

	// writing is held during a write.
	writing sync.Mutex

	mu    sync.Mutex
	byUID map[drain.UID]*exclusion
	// expiries says until when each holder's exclusions stand: every renewal is of all.
	expiries map[string]time.Time
	// version counts the changes, tried is the one that the last attempt to write was about, and
	// written the one that is in the file.
	version, tried, written uint64
	// began is when the attempt that runs began. The zero time: none runs.
	began time.Time
	err   error
}

// Open reads the journal in dir, which must exist, and keeps other agents away from it until Close.
// An empty dir means that the journal is in memory only. The error is ErrLocked, or ctx's; whatever
// else is wrong with the directory is said in log and by Err, and stops nothing.
func Open(ctx context.Context, dir string, wrote func(error), log *slog.Logger) (*Journal, error) {
	if dir == "" {
		return On(nil, time.Now(), Stamp{}, nil, log), nil
	}
	log = log.With("dir", dir)
	held, err := lock(ctx, filepath.Join(dir, lockName))
	if err != nil {
		if errors.Is(err, ErrLocked) || ctx.Err() != nil {
			return nil, fmt.Errorf("journal in %s: %w", dir, err)
		}
		log.Warn("journal cannot be locked: nothing keeps another agent away from it", "error", err)
	}
	j := On(folder(dir), time.Now(), stampNow(), wrote, log)
	j.lock = held
	return j, nil
}

// On reads the journal on disk, at the moment that is now and at. A nil disk means that the journal
// is in memory only. wrote, which may be nil, is called after each attempt to write.
func On(disk Disk, now time.Time, at Stamp, wrote func(error), log *slog.Logger) *Journal {
	j := &Journal{disk: disk, wrote: wrote, log: log, wake: make(chan struct{}, 1),
		byUID: map[drain.UID]*exclusion{}, expiries: map[string]time.Time{}}
	if disk == nil {
		return j
	}
	data, err := disk.Read()
	if err == nil {
		err = j.decode(data, now, at)
	}
	switch {
	case err == nil:
		log.Info("journal read", "exclusions", len(j.byUID))
	case errors.Is(err, fs.ErrNotExist):
		log.Info("journal is new")
	case errors.Is(err, errBoot):
		log.Info("journal begins empty", "reason", err)
	default:
		j.err = err
		aside := disk.SetAside()
		log.Error("journal cannot be read: starting without the exclusions in it", "error", err, "setAside",
			aside == nil)
	}
	j.changed(true) // the first write shows at once whether there is a disk that takes one
	return j
}

// Close lets other agents use the directory. Call it after Run has returned.
func (j *Journal) Close() {
	if j.lock != nil && j.writing.TryLock() { // a write that is stuck keeps it to the end of the process
		_ = j.lock.Close()
	}
}

// Exclusions lists all that the journal holds, sorted by UID.
func (j *Journal) Exclusions() []Exclusion {
	j.mu.Lock()
	defer j.mu.Unlock()
	all := make([]Exclusion, 0, len(j.byUID))
	for _, s := range j.byUID {
		e := Exclusion{Pod: s.pod, Since: s.since, Terminating: !s.terminatingAt.IsZero(),
			Expiries: make(map[string]time.Time, len(s.holders))}
		for holder := range s.holders {
			e.Expiries[holder] = j.expiries[holder]
		}
		all = append(all, e)
	}
	slices.SortFunc(all, func(x, y Exclusion) int { return strings.Compare(string(x.Pod.UID), string(y.Pod.UID)) })
	return all
}

// Exclude records an exclusion of holder on pod, or renews all of holder's expiries. The oldest
// since of all holders is kept.
func (j *Journal) Exclude(pod drain.Pod, holder string, since, expires time.Time) {
	j.mu.Lock()
	defer j.mu.Unlock()
	s := j.byUID[pod.UID]
	if s == nil {
		s = &exclusion{pod: pod, since: since, holders: map[string]bool{}}
		j.byUID[pod.UID] = s
	}
	if s.since.IsZero() || since.Before(s.since) {
		s.since = since
		j.changed(false)
	}
	if s.pod.Name == "" {
		s.pod = pod
	}
	if !s.holders[holder] {
		s.holders[holder] = true
		j.changed(true)
		s.added = j.version
	}
	j.renew(holder, expires)
}

// Renew extends all of holder's expiries until expires at least.
func (j *Journal) Renew(holder string, expires time.Time) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if _, known := j.expiries[holder]; known {
		j.renew(holder, expires)
	}
}

func (j *Journal) renew(holder string, expires time.Time) {
	if expires.After(j.expiries[holder]) {
		j.expiries[holder] = expires
		j.changed(false)
	}
}

// Readmit records that holder's expiry on uid has ended.
func (j *Journal) Readmit(uid drain.UID, holder string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if s := j.byUID[uid]; s != nil && s.holders[holder] {
		delete(s.holders, holder)
		j.forgetIfEmpty(uid, s)
		j.changed(false)
	}
}

// Terminate records that the pod is terminating or gone. It is remembered for drain.Times.Memory,
// expiries or not.
func (j *Journal) Terminate(now time.Time, uid drain.UID) {
	j.mu.Lock()
	defer j.mu.Unlock()
	s := j.byUID[uid]
	if s == nil {
		s = &exclusion{pod: drain.Pod{UID: uid}, holders: map[string]bool{}}
		j.byUID[uid] = s
	}
	if s.terminatingAt.IsZero() {
		s.terminatingAt = now
		j.changed(false)
	}
}

// Lapse ends every expiry that is over at now, and returns the UIDs of living pods whose last one
// ended, sorted. It forgets the dead in time, and is to be called each few seconds.
func (j *Journal) Lapse(now time.Time) []drain.UID {
	j.mu.Lock()
	defer j.mu.Unlock()
	uids := j.expired(now)
	for uid, s := range j.byUID {
		for holder := range s.holders {
			if now.After(j.expiries[holder]) {
				delete(s.holders, holder)
				j.changed(false)
			}
		}
		j.forgetIfEmpty(uid, s)
	}
	j.prune(now)
	return uids
}

// Expired lists the UIDs that Lapse would return, and changes nothing.
func (j *Journal) Expired(now time.Time) []drain.UID {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.expired(now)
}

func (j *Journal) expired(now time.Time) (uids []drain.UID) {
	for uid, s := range j.byUID {
		stands := !s.terminatingAt.IsZero()
		for holder := range s.holders {
			stands = stands || !now.After(j.expiries[holder])
		}
		if !stands {
			uids = append(uids, uid)
		}
	}
	slices.Sort(uids)
	return uids
}

func (j *Journal) forgetIfEmpty(uid drain.UID, s *exclusion) {
	if len(s.holders) == 0 && s.terminatingAt.IsZero() {
		delete(j.byUID, uid)
	}
}

// prune forgets the dead whose time is up, of too many the oldest, and who holds nothing any more.
func (j *Journal) prune(now time.Time) {
	var dead []*exclusion
	holding := map[string]bool{}
	for uid, s := range j.byUID {
		maps.Copy(holding, s.holders)
		switch {
		case s.terminatingAt.IsZero() || len(s.holders) > 0:
		case now.Sub(s.terminatingAt) > terminatingMemory:
			delete(j.byUID, uid)
		default:
			dead = append(dead, s)
		}
	}
	maps.DeleteFunc(j.expiries, func(holder string, _ time.Time) bool { return !holding[holder] })
	slices.SortFunc(dead, func(x, y *exclusion) int { return x.terminatingAt.Compare(y.terminatingAt) })
	for _, s := range dead[:max(0, len(dead)-maxTerminating)] {
		delete(j.byUID, s.pod.UID)
	}
}

// changed, called with the lock, notes that the file must follow: at once if that is urgent, and
// otherwise within writeEvery.
func (j *Journal) changed(urgent bool) {
	j.version++
	if urgent {
		select {
		case j.wake <- struct{}{}:
		default:
		}
	}
}

// Settled reports whether the exclusion of uid is in the file, or will not be for now: whether it
// is as safe as it can be.
func (j *Journal) Settled(now time.Time, uid drain.UID) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	s := j.byUID[uid]
	return s == nil || j.disk == nil || j.tried >= s.added || j.stuck(now)
}

// Err says what is wrong with the file: why the last attempt to write failed, or the reading of
// what an earlier agent left. Nil: nothing is.
func (j *Journal) Err() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.stuck(time.Now()) {
		return errStuck
	}
	return j.err
}

func (j *Journal) stuck(now time.Time) bool {
	return !j.began.IsZero() && now.Sub(j.began) > SyncTimeout
}

// Run writes what has changed until ctx is done, and then once more.
func (j *Journal) Run(ctx context.Context) error {
	ticker := time.NewTicker(writeEvery)
	defer ticker.Stop()
	for {
		select {
		case <-j.wake:
		case <-ticker.C:
		case <-ctx.Done():
			_ = j.Sync()
			return nil
		}
		_ = j.Sync() // Err says it
	}
}

// Sync brings to the file what is not there yet. An error says that it is not there, and that the
// caller should go on without. It takes SyncTimeout at most, and where a write is stuck no time.
func (j *Journal) Sync() error {
	j.mu.Lock()
	stuck, clean := j.stuck(time.Now()), j.written == j.version
	j.mu.Unlock()
	if j.disk == nil || clean {
		return nil
	}
	if stuck {
		return errStuck
	}
	done := make(chan error, 1)
	go func() { done <- j.Write(func() (time.Time, Stamp) { return time.Now(), stampNow() }) }()
	select {
	case err := <-done:
		return err
	case <-time.After(SyncTimeout):
		return errStuck
	}
}

// Write is Sync without a bound. clock returns what moment it is.
func (j *Journal) Write(clock func() (now time.Time, at Stamp)) error {
	wrote, failing, err := j.write(clock)
	// A log that is slow delays no exclusion.
	switch {
	case err != nil && (failing == nil || failing.Error() != err.Error()):
		j.log.Error("journal cannot be written: going on without; exclusions are forgotten if the agent dies",
			"error", err)
	case wrote && err == nil && failing != nil:
		j.log.Info("journal is written again")
	}
	if wrote && j.wrote != nil {
		j.wrote(err)
	}
	return err
}

// write returns whether something was to be written, and how the attempt before ended.
func (j *Journal) write(clock func() (now time.Time, at Stamp)) (wrote bool, failing, err error) {
	j.writing.Lock()
	defer j.writing.Unlock()
	j.mu.Lock()
	if j.disk == nil || j.written == j.version {
		j.mu.Unlock()
		return false, nil, nil
	}
	now, at := clock()
	content, version := j.content(now, at), j.version
	j.began = now
	j.mu.Unlock()

	data, err := content.encode()
	if err == nil {
		err = j.disk.Replace(data)
	}

	j.mu.Lock()
	defer j.mu.Unlock()
	failing = j.err
	j.began, j.tried, j.err = time.Time{}, version, err
	if err == nil {
		j.written = version
	}
	return true, failing, err
}
