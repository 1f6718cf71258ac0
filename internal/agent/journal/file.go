package journal

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

const (
	// version is that of the file. It grows only when an older agent could not read what a newer
	// one writes; fields may be added without.
	version = 1
	// maxFile bounds what is read, in bytes. 10,000 dead pods are about 1 MiB.
	maxFile = 64 << 20
)

var (
	// errCorrupt: it is not a whole file of ours.
	errCorrupt = errors.New("corrupt")
	// errVersion: a newer agent has written it.
	errVersion = errors.New("of a version that this agent does not know")
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func sum[T string | []byte](rest T) uint32 { return crc32.Checksum([]byte(rest), castagnoli) }

// stamp is one moment by two clocks.
type stamp struct {
	Wall time.Time `json:"wall"`
	// Boot names the time between two boots of the machine, and SinceBoot is counted in it. Empty:
	// unknown.
	Boot      string        `json:"boot,omitempty"`
	SinceBoot time.Duration `json:"sinceBoot,omitempty"`
}

// since says how much time has passed from then to s, never less than none.
func (s stamp) since(then stamp) time.Duration {
	if s.Boot != "" && s.Boot == then.Boot {
		return max(0, s.SinceBoot-then.SinceBoot)
	}
	return max(0, s.Wall.Sub(then.Wall))
}

// head is the file's first line. The rest of the file is what it counts and sums.
type head struct {
	Version int    `json:"lameduckExclusions"`
	Bytes   int    `json:"bytes"`
	CRC32C  uint32 `json:"crc32c"`
}

// body is the rest. Its times are by the wall clock of Written.
type body struct {
	Written stamp `json:"written"`
	// Expiries says when each holder's ends.
	Expiries   map[string]time.Time `json:"expiries"`
	Exclusions []line               `json:"exclusions"`
}

type line struct {
	drain.Pod
	Since   time.Time `json:"since,omitzero"`
	Holders []string  `json:"holders,omitempty"`
	// TerminatingAt is when the pod was first said to be dead.
	TerminatingAt time.Time `json:"terminatingAt,omitzero"`
}

// body copies the book. Times of now's clock become times of the wall clock of at, the same moment.
func (b *book) body(now time.Time, at stamp) body {
	wall := func(t time.Time) time.Time { return at.Wall.Add(t.Sub(now)).UTC() }
	out := body{Written: at, Expiries: make(map[string]time.Time, len(b.holders)),
		Exclusions: make([]line, 0, len(b.byUID))}
	for holder, l := range b.holders {
		out.Expiries[holder] = wall(l.stored)
	}
	for _, s := range b.byUID {
		l := line{Pod: s.pod, Since: s.since.UTC().Round(0), Holders: slices.Sorted(maps.Keys(s.holders))}
		if !s.terminatingAt.IsZero() {
			l.TerminatingAt = wall(s.terminatingAt)
		}
		out.Exclusions = append(out.Exclusions, l)
	}
	return out
}

// encode makes the bytes of a file.
func (b body) encode() ([]byte, error) {
	slices.SortFunc(b.Exclusions, func(x, y line) int { return strings.Compare(string(x.UID), string(y.UID)) })
	rest, err := json.MarshalIndent(b, "", " ") // operators read it when something is wrong
	if err != nil {
		return nil, err
	}
	rest = append(rest, '\n')
	first, err := json.Marshal(head{Version: version, Bytes: len(rest), CRC32C: sum(rest)})
	if err != nil {
		return nil, err
	}
	return slices.Concat(first, []byte{'\n'}, rest), nil
}

// decode reads a file into a book, as of now, the moment at. The error is errCorrupt or errVersion.
func decode(data []byte, now time.Time, at stamp) (book, error) {
	first, rest, _ := bytes.Cut(data, []byte{'\n'})
	var h head
	if err := json.Unmarshal(first, &h); err != nil || h.Version < 1 {
		return book{}, fmt.Errorf("%w: its first line is not one of ours", errCorrupt)
	}
	if h.Version > version {
		return book{}, fmt.Errorf("%w: %d, want at most %d", errVersion, h.Version, version)
	}
	if len(rest) != h.Bytes {
		return book{}, fmt.Errorf("%w: %d bytes after the first line, want %d", errCorrupt, len(rest), h.Bytes)
	}
	if got := sum(rest); got != h.CRC32C {
		return book{}, fmt.Errorf("%w: checksum %d, want %d", errCorrupt, got, h.CRC32C)
	}
	var in body
	if err := json.Unmarshal(rest, &in); err != nil {
		return book{}, fmt.Errorf("%w: %v", errCorrupt, err)
	}
	// What is counted from the moment of writing holds, whatever the wall clock has done since.
	passed := at.since(in.Written)
	here := func(t time.Time) time.Time { return now.Add(t.Sub(in.Written.Wall) - passed) }
	b := newBook()
	for _, l := range in.Exclusions {
		if l.UID == "" {
			continue
		}
		for _, holder := range l.Holders {
			// A holder without an expiry, which we never write, holds nothing any more; ending it
			// is for the rule that ends all.
			b.exclude(now, l.Pod, holder, l.Since, here(in.Expiries[holder]))
		}
		if !l.TerminatingAt.IsZero() {
			b.terminate(here(l.TerminatingAt), l.UID)
			b.byUID[l.UID].pod = l.Pod
		}
	}
	for holder, l := range b.holders {
		l.stored = here(in.Expiries[holder]) // it is what the file says
	}
	return b, nil
}
