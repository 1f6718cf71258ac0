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

	"github.com/lameduck-io/lameduck/pkg/health"
)

// own is the defaults section of the file, from which its backends are made. It is empty. Words of
// a default-server line in another one, such as on-marked-down or agent-check, would make HAProxy
// end requests on a server that the agent takes out, or put the server back, and a backend cannot
// take such a word back. "option persist" would send requests to servers in maintenance.
const own = "lameduck-inherits-nothing"

const fileHead = `# The backends that the Lameduck agent directs. Load it with an additional -f, the last one.
# Written by the agent and overwritten at every change: edits are lost.

# The backends inherit nothing: what they need is in the agent's configuration, under lines.
defaults ` + own + `
`

// wanted is the content of the servers file: the names of the servers of each backend.
type wanted map[string]map[string]bool

// render returns the servers file: one section for each backend, in the order of the configuration,
// with the servers sorted by name. Equal arguments give equal bytes.
func render(backends []Backend, w wanted) []byte {
	var b bytes.Buffer
	b.WriteString(fileHead)
	for _, be := range backends {
		b.WriteString("\nbackend " + be.Backend + " from " + own + "\n")
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

// Prepare implements gateway.Starter: the servers file lists the servers of keys, and no others.
func (g *Gateway) Prepare(keys []health.Key) error {
	for _, b := range g.backends {
		clear(g.wanted[b.Backend])
	}
	for _, k := range keys {
		if b, name, err := g.resolve(k); err == nil && !g.former(b) { // others get an error when it runs
			g.wanted[b.Backend][name] = true
		}
	}
	return g.write()
}

// poolWords are added to every server unless ServerOptions contains them. They are HAProxy's
// defaults, which 2.6 does not apply to servers added at run time. Without them, such a server
// would keep no idle connection and open one for each request, until the next reload.
var poolWords = [][2]string{{"pool-max-conn", "-1"}, {"pool-purge-delay", "5s"}}

// serverWords returns the words that follow the address of each server of the backend, in the file
// and in "add server".
func serverWords(b *Backend) string {
	words := strings.Fields(b.ServerOptions)
	for _, w := range poolWords {
		if !slices.Contains(words, w[0]) {
			words = append(words, w[0], w[1])
		}
	}
	return strings.Join(words, " ")
}

// parseFile parses a file that render wrote, and returns the servers of each backend section. It
// ignores options and other lines, because the configuration may have changed since. A server line
// that render cannot have written is an error: the file is not the agent's, and must not be
// overwritten.
func parseFile(data []byte) (wanted, error) {
	w := wanted{}
	section := ""
	for i, line := range strings.Split(string(data), "\n") {
		f := strings.Fields(line)
		if len(f) == 0 || strings.HasPrefix(f[0], "#") {
			continue
		}
		switch {
		case section == "" && slices.Equal(f, []string{"defaults", own}):
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

// writeFile replaces the file if its content differs. A reader sees either the old or the complete
// new content, because the new file is written beside the old one and renamed. It is not synced to
// disk: a crash of the machine also ends the servers that the file describes, and the agent then
// routes again. The temporary name begins with a dot, so that HAProxy does not load it where -f
// names a directory.
func writeFile(path string, data []byte) error {
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) {
		return nil
	}
	tmp := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".tmp")
	err := os.WriteFile(tmp, data, 0o644)
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		_ = os.Remove(tmp) // as far as possible
		return &failure{Command: "write " + path, Kind: kindFile, Err: err}
	}
	return nil
}
