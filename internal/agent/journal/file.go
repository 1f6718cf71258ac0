package journal

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

const (
	fileName = "exclusions.json"
	lockName = "exclusions.lock"
	// newSuffix is the suffix of the file that is being written, asideSuffix that of the last file
	// that could not be read.
	newSuffix   = ".new"
	asideSuffix = ".unreadable"

	// version is the version of the file. It grows only when an older agent could not read what a
	// newer one writes; fields may be added without that.
	version = 2
	// maxFile bounds the file that is read, in bytes. 10,000 deleted pods take about 1 MiB.
	maxFile = 64 << 20
	// lockTimeout is how long Open waits for another agent's lock: an agent that is ending has it
	// until its process has ended.
	lockTimeout = 5 * time.Second
)

var (
	// errCorrupt: it is not a complete journal.
	errCorrupt = errors.New("corrupt")
	// errVersion: another version of the agent has written it.
	errVersion = errors.New("of a version that this agent does not know")
	// errBoot: the machine was booted since, so that the file has no meaning any more.
	errBoot = errors.New("written before the machine was booted")
)

// Stamp is a moment: the time since Boot, which names the time between two boots of the machine.
type Stamp struct {
	Boot string        `json:"boot"`
	At   time.Duration `json:"at"`
}

// boot is read once, so that a later failure does not make the file look like one of another boot.
var boot = sync.OnceValues(func() (string, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(id)), err
})

// stampNow counts from the boot, including the time in which the machine sleeps, as expiries do. If
// that cannot be read, it is the time by the wall clock, where no boot has a name.
func stampNow() Stamp {
	id, err := boot()
	var t unix.Timespec
	if err != nil || unix.ClockGettime(unix.CLOCK_BOOTTIME, &t) != nil {
		return Stamp{At: time.Duration(time.Now().UnixNano())}
	}
	return Stamp{Boot: id, At: time.Duration(t.Nano())}
}

// content is the file. Its times but since are relative to the moment at which it was written.
type content struct {
	Version int   `json:"lameduckExclusions"`
	Written Stamp `json:"written"`
	// Expiries is the time until each holder's expiry, from Written on.
	Expiries   map[string]time.Duration `json:"expiries"`
	Exclusions []line                   `json:"exclusions"`
}

type line struct {
	drain.Pod
	Since   time.Time `json:"since,omitzero"`
	Holders []string  `json:"holders,omitempty"`
	// Terminating is how long ago the pod was first seen terminating or deleted. Nil: it was not.
	Terminating *time.Duration `json:"terminating,omitempty"`
}

// content copies the journal.
func (j *Journal) content(now time.Time, at Stamp) content {
	c := content{Version: version, Written: at, Expiries: make(map[string]time.Duration, len(j.expiries)),
		Exclusions: make([]line, 0, len(j.byUID))}
	for holder, expires := range j.expiries {
		c.Expiries[holder] = expires.Sub(now)
	}
	for _, s := range j.byUID {
		l := line{Pod: s.pod, Since: s.since.UTC().Round(0), Holders: slices.Sorted(maps.Keys(s.holders))}
		if !s.terminatingAt.IsZero() {
			l.Terminating = new(now.Sub(s.terminatingAt))
		}
		c.Exclusions = append(c.Exclusions, l)
	}
	return c
}

func (c content) encode() ([]byte, error) {
	slices.SortFunc(c.Exclusions, func(x, y line) int { return strings.Compare(string(x.UID), string(y.UID)) })
	data, err := json.Marshal(c)
	return append(data, '\n'), err
}

// decode replaces the journal's content by that of a file, as of now, which is at. With an error,
// errCorrupt, errVersion or errBoot, nothing is replaced.
func (j *Journal) decode(data []byte, now time.Time, at Stamp) error {
	var c content
	switch err := json.Unmarshal(data, &c); {
	case err != nil:
		return fmt.Errorf("%w: %v", errCorrupt, err)
	case c.Version != version:
		return fmt.Errorf("%w: %d, want %d", errVersion, c.Version, version)
	case c.Written.Boot != at.Boot:
		return errBoot
	}
	written := now.Add(-max(0, at.At-c.Written.At))
	for _, l := range c.Exclusions {
		s := &exclusion{pod: l.Pod, since: l.Since, holders: map[string]bool{}}
		for _, holder := range l.Holders {
			s.holders[holder] = true
			j.expiries[holder] = written.Add(c.Expiries[holder])
		}
		if l.Terminating != nil {
			s.terminatingAt = written.Add(-*l.Terminating)
		}
		if l.UID != "" && (l.Terminating != nil || len(l.Holders) > 0) {
			j.byUID[l.UID] = s
		}
	}
	return nil
}

// folder is a Disk: a directory.
type folder string

func (d folder) path() string { return filepath.Join(string(d), fileName) }

// SetAside implements Disk.
func (d folder) SetAside() error { return os.Rename(d.path(), d.path()+asideSuffix) }

// Replace implements Disk.
func (d folder) Replace(data []byte) error {
	if err := os.WriteFile(d.path()+newSuffix, data, 0o600); err != nil {
		return err
	}
	return os.Rename(d.path()+newSuffix, d.path())
}

// Read implements Disk. It reads at most maxFile bytes.
func (d folder) Read() ([]byte, error) {
	f, err := os.Open(d.path())
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

// lock takes a lock that ends with the process, however it ends. On a read-only disk the file must
// already exist.
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
