package haproxy

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

const fileHead = `# The backends that the Lameduck agent directs. Load it with an additional -f.
# Written by the agent and overwritten at every change: edits are lost.
`

// wanted is what the servers file lists: for each backend the names of its servers.
type wanted map[string]map[string]bool

func (w wanted) clone() wanted {
	c := make(wanted, len(w))
	for be, names := range w {
		c[be] = maps.Clone(names)
	}
	return c
}

// render writes the file: one section for each backend, in the order of the configuration, servers
// sorted by name, so that the same content is the same bytes.
func render(backends []Backend, w wanted) []byte {
	var b bytes.Buffer
	b.WriteString(fileHead)
	for _, be := range backends {
		b.WriteString("\nbackend " + be.Backend)
		if be.Defaults != "" {
			b.WriteString(" from " + be.Defaults)
		}
		// "option persist", which defaults may have set, sends to servers in maintenance. A state
		// file would bring back states of another time.
		b.WriteString("\n    no option persist\n    load-server-state-from-file none\n")
		for _, l := range be.Lines {
			b.WriteString("    " + strings.TrimSpace(l) + "\n")
		}
		for _, name := range slices.Sorted(maps.Keys(w[be.Backend])) {
			t, ok := parseName(name)
			if !ok {
				continue // never: only serverName's names get in
			}
			fmt.Fprintf(&b, "    server %s %s %s\n", name, t.Addr, serverWords(&be))
		}
	}
	return b.Bytes()
}

// poolWords are given to every server unless ServerOptions has them. They are HAProxy's defaults,
// which 2.6 forgets for servers added at run time: these would keep no idle connection, and open
// one for each request, until the next reload.
var poolWords = [][2]string{{"pool-max-conn", "-1"}, {"pool-purge-delay", "5s"}}

// serverWords is what follows the address of each server of the backend, in the file and in "add
// server".
func serverWords(b *Backend) string {
	words := strings.Fields(b.ServerOptions)
	for _, w := range poolWords {
		if !slices.Contains(words, w[0]) {
			words = append(words, w[0], w[1])
		}
	}
	return strings.Join(words, " ")
}

// parseFile reads back what render wrote: the servers of each backend section. Options and other
// lines are not looked at, for the configuration may have changed since. A server line that is not
// the agent's is an error: the file is not the agent's then, and must not be overwritten.
func parseFile(data []byte) (wanted, error) {
	w := wanted{}
	section := ""
	for i, line := range strings.Split(string(data), "\n") {
		f := strings.Fields(line)
		if len(f) == 0 || strings.HasPrefix(f[0], "#") {
			continue
		}
		switch {
		case f[0] == "backend":
			if len(f) < 2 || !nameChars(f[1]) {
				return nil, fmt.Errorf("line %d: %q names no backend", i+1, shorten(line))
			}
			section = f[1]
			if w[section] != nil {
				return nil, fmt.Errorf("line %d: backend %s for the second time", i+1, section)
			}
			w[section] = map[string]bool{}
		case section == "":
			return nil, fmt.Errorf("line %d: %q stands before the first backend", i+1, shorten(line))
		case slices.Contains(sectionWords, f[0]):
			return nil, fmt.Errorf("line %d: section %s is not the agent's", i+1, f[0])
		case f[0] == "server":
			if len(f) < 3 {
				return nil, fmt.Errorf("line %d: %q has no address", i+1, shorten(line))
			}
			t, ok := parseName(f[1])
			if !ok || t.Addr.String() != f[2] {
				return nil, fmt.Errorf("line %d: server %q at %q is not the agent's", i+1, shorten(f[1]), shorten(f[2]))
			}
			if w[section][f[1]] {
				return nil, fmt.Errorf("line %d: server %s for the second time", i+1, f[1])
			}
			w[section][f[1]] = true
		}
	}
	return w, nil
}

// readFile returns the file's servers; a missing or empty file has none.
func readFile(path string) (wanted, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return wanted{}, nil
	}
	if err != nil {
		return nil, &failure{Command: "read " + path, Kind: kindFile, Err: err}
	}
	w, err := parseFile(data)
	if err != nil {
		return nil, &failure{Command: "read " + path, Kind: kindFile, Err: fmt.Errorf("not overwritten: %w", err)}
	}
	return w, nil
}

// writeFile replaces the file if its content differs. A reader sees the old or the new content,
// never a part: the new one is written beside it and renamed. It is not synced to disk: what a
// crash of the machine could lose describes servers that died with it, and the agent routes afresh.
// The temporary name begins with a dot, so that HAProxy does not load it where -f names a
// directory.
func writeFile(path string, data []byte) error {
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) {
		return nil
	}
	tmp := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".tmp")
	err := func() error {
		f, err := os.OpenFile(tmp, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o644)
		if err != nil {
			return err
		}
		if _, err = f.Write(data); err != nil {
			f.Close()
			return err
		}
		if err = f.Close(); err != nil {
			return err
		}
		return os.Rename(tmp, path)
	}()
	if err != nil {
		_ = os.Remove(tmp) // as far as possible
		return &failure{Command: "write " + path, Kind: kindFile, Err: err}
	}
	return nil
}
