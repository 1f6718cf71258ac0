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

	"github.com/lameduck-io/lameduck/internal/signal"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

const (
	// SyncTimeout is how long a caller waits for one write: long for a disk, short compared to a
	// drain's deadline.
	SyncTimeout = time.Second
	// writeEvery is how often changes are written for which no caller waits, or that could not be
	// written.
	writeEvery = time.Second
	// maxTerminating bounds how many deleted pods without an exclusion are stored. If a cluster
	// deletes more of them within drain.Times.Memory, the oldest are dropped. By then
	// EndpointSlices no longer list them.
	maxTerminating = 10_000
)

// terminatingMemory is how long a deleted pod is stored: as long as the ledger remembers it.
var terminatingMemory = drain.DefaultTimes().Memory

// ErrLocked means that another agent uses the directory.
var ErrLocked = errors.New("another agent uses it")

// errStuck means that a write does not end.
var errStuck = fmt.Errorf("a write has not ended within %s", SyncTimeout)

// Disk is where a journal is stored.
type Disk interface {
	// Read returns the stored data. The error is [fs.ErrNotExist] if there is none.
	Read() ([]byte, error)
	// SetAside renames data that cannot be read.
	SetAside() error
	// Replace replaces the stored data atomically.
	Replace(data []byte) error
}

// Exclusion is an exclusion, or a terminating pod, in the journal.
type Exclusion struct {
	Pod drain.Pod
	// Since is the oldest start of the drain that any holder gave. The zero time: the pod was only
	// recorded as terminating.
	Since time.Time
	// Expiries is when each holder's part expires. After Open this may be in the past. The caller
	// decides when to end such an exclusion: time alone does not, see package exclusion.
	Expiries map[string]time.Time
	// Terminating reports whether the pod was seen terminating or deleted.
	Terminating bool
}

// exclusion exists only for a pod that is terminating or has a holder.
type exclusion struct {
	pod     drain.Pod
	since   time.Time
	holders map[string]bool
	// terminatingAt is when the pod was first recorded as terminating. The zero time: it was not.
	terminatingAt time.Time
	// added is the version in which a holder was last added. It must be in the file before the
	// gateway is changed.
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
	wake signal.Signal

	// writing is held during a write.
	writing sync.Mutex

	mu    sync.Mutex
	byUID map[drain.UID]*exclusion
	// expiries is when each holder's exclusions expire: a renewal renews all of them.
	expiries map[string]time.Time
	// version counts the changes. tried is the version of the last attempt to write, written the
	// version in the file.
	version, tried, written uint64
	// began is when the running attempt to write began. The zero time: none runs.
	began time.Time
	err   error
}

// Open reads the journal in dir, which must exist, and locks it until Close. With an empty dir the
// journal is in memory only. The error is ErrLocked, or ctx's. Any other problem with the directory
// is logged and, except a failure to lock, returned by Err, and blocks nothing.
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
		log.Warn("journal cannot be locked: another agent could use it too", "error", err)
	}
	j := On(folder(dir), time.Now(), stampNow(), wrote, log)
	j.lock = held
	return j, nil
}

// On returns the journal that is stored on disk. now and at are the same moment, by the wall clock
// and since boot. With a nil disk the journal is in memory only. wrote, which may be nil, is called
// after each attempt to write.
func On(disk Disk, now time.Time, at Stamp, wrote func(error), log *slog.Logger) *Journal {
	j := &Journal{disk: disk, wrote: wrote, log: log, wake: signal.New(),
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
	j.changed(true) // the first write shows immediately whether the disk is writable
	return j
}

// Close unlocks the directory. Call it after Run has returned.
func (j *Journal) Close() {
	if j.lock != nil && j.writing.TryLock() { // a write that is stuck keeps the lock until the process ends
		_ = j.lock.Close()
	}
}

// Exclusions returns the content of the journal, sorted by UID.
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

// Exclude records that holder excludes pod, and extends holder's expiry to expires at least. A
// holder has one expiry for all of its exclusions. The earliest since of all holders is kept.
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

// Renew extends holder's expiry to expires at least.
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

// Readmit records that holder no longer excludes uid.
func (j *Journal) Readmit(uid drain.UID, holder string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if s := j.byUID[uid]; s != nil && s.holders[holder] {
		delete(s.holders, holder)
		j.forgetIfEmpty(uid, s)
		j.changed(false)
	}
}

// Terminate records that the pod is terminating or deleted. The journal keeps that for
// drain.Times.Memory, with or without a holder.
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

// Lapse ends the exclusions whose holder's expiry is before now. It also forgets old terminating
// pods. Call it every few seconds.
func (j *Journal) Lapse(now time.Time) {
	j.mu.Lock()
	defer j.mu.Unlock()
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
}

// Expired returns the UIDs of the pods that have no holder after Lapse and are not terminating,
// sorted.
func (j *Journal) Expired(now time.Time) (uids []drain.UID) {
	j.mu.Lock()
	defer j.mu.Unlock()
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

// prune forgets terminating pods that are old or, the oldest first, too many, and holders without
// exclusions.
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

// changed, called with the lock, records that the file must be written: immediately if that is
// urgent, and otherwise within writeEvery.
func (j *Journal) changed(urgent bool) {
	j.version++
	if urgent {
		j.wake.Raise()
	}
}

// Settled reports whether the exclusion of uid is in the file, or cannot be written now.
func (j *Journal) Settled(now time.Time, uid drain.UID) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	s := j.byUID[uid]
	return s == nil || j.disk == nil || j.tried >= s.added || j.stuck(now)
}

// Err returns the error of the last attempt to write the file or, before the first attempt, of
// reading it. It also returns an error while a write takes longer than SyncTimeout.
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
		_ = j.Sync() // Err returns it
	}
}

// Sync writes all changes to the file. If it returns an error, they are not in the file, and the
// caller should continue without. It takes at most SyncTimeout, and returns immediately while a
// write is stuck.
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

// Write is Sync without a time limit. clock returns the present time and its stamp.
func (j *Journal) Write(clock func() (now time.Time, at Stamp)) error {
	wrote, failing, err := j.write(clock)
	// Logged without the lock: a slow log delays no exclusion.
	switch {
	case err != nil && (failing == nil || failing.Error() != err.Error()):
		j.log.Error("journal cannot be written: exclusions are lost if the agent crashes",
			"error", err)
	case wrote && err == nil && failing != nil:
		j.log.Info("journal is written again")
	}
	if wrote && j.wrote != nil {
		j.wrote(err)
	}
	return err
}

// write returns whether there was something to write, and the error of the attempt before.
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
