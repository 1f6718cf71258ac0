package haproxy

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	// DefaultTimeout bounds one command if Config.Timeout is 0.
	DefaultTimeout = 2 * time.Second
	// maxSocketPath is the room for a path in a unix socket's address on Linux.
	maxSocketPath = 107
	// maxOptionWords keeps "add server" below the 64 words that HAProxy reads of one command.
	maxOptionWords = 48
)

// Config says where HAProxy is and which of its backends are pools.
type Config struct {
	// Socket is the path of the master socket: haproxy -W -S <path>,level,admin. The default level is admin.
	Socket string
	// ServersFile is the file with the backend sections of owned backends, which HAProxy loads by an additional -f. New
	// writes it if it does not exist, so it must run before HAProxy's first start. Required if a backend is Owned.
	ServersFile string
	// Backends are the pools. Pools and backends are one to one.
	Backends []Backend
	// Timeout bounds each command; 0 means DefaultTimeout.
	Timeout time.Duration
}

// Backend is one pool and the HAProxy backend that it is.
type Backend struct {
	Pool health.Pool
	// Backend is the name of HAProxy's backend section.
	Backend string
	// Owned says that the agent writes the section and makes and deletes its servers. Otherwise people did, and the agent only
	// puts servers into maintenance and back.
	Owned bool
	// Defaults names the defaults section that the owned section is made from; empty means the last one above it. Give it one of
	// its own: HAProxy warns about a named section that is used both by name and as the last one.
	Defaults string
	// Lines are more lines of the owned section: balance, options, timeouts. They are written as they are.
	Lines []string
	// ServerOptions are words for every server of the owned backend, such as "check inter 2s maxconn 50". HAProxy takes fewer
	// words for servers added at run time than in the configuration; it says so by KindRefused.
	ServerOptions string
}

// sectionWords begin a section in HAProxy's configuration, or reach from the backend section into what it is.
var sectionWords = []string{
	"backend", "cache", "crt-store", "defaults", "dynamic-update", "fcgi-app", "frontend", "global", "http-errors", "listen", "log-forward",
	"mailers", "peers", "program", "resolvers", "ring", "traces", "userlist", "acme", "healthcheck", "log-profile",
}

// lineWords may not begin a line of an owned section, each with the reason.
var lineWords = map[string]string{
	"server":                      "the agent writes the servers",
	"server-template":             "the agent writes the servers",
	"default-server":              "servers added at run time do not take it; use ServerOptions",
	"dispatch":                    "it sends to an address whatever the servers' states are",
	"force-persist":               "it sends to servers in maintenance",
	"load-server-state-from-file": "the servers file is the state",
	"disabled":                    "a disabled backend serves nothing",
}

// optionWords may not be in ServerOptions, each with the reason.
var optionWords = map[string]string{
	"agent-check":    "an agent's answer can put a server in maintenance back into service",
	"disabled":       "the agent decides",
	"enabled":        "the agent decides",
	"id":             "ids are unique in a backend",
	"track":          "maintenance would come and go with another server",
	"on-marked-down": "shutdown-sessions also ends requests when a server is put into maintenance",
	"cookie":         "HAProxy refuses it for servers added at run time",
	"resolvers":      "targets are addresses",
	"init-addr":      "targets are addresses",
}

func (c *Config) validate() error {
	bad := func(field string, value any, why string) error {
		return fmt.Errorf("haproxy config: %s %q: %s", field, fmt.Sprint(value), why)
	}
	switch {
	case c.Socket == "":
		return bad("Socket", "", "want the path of the master socket")
	case len(c.Socket) > maxSocketPath:
		return bad("Socket", c.Socket, fmt.Sprintf("%d bytes, a unix socket's path has at most %d", len(c.Socket), maxSocketPath))
	case strings.ContainsRune(c.Socket, 0):
		return bad("Socket", c.Socket, "holds a NUL byte")
	case c.Timeout < 0:
		return bad("Timeout", c.Timeout, "is negative")
	case len(c.Backends) == 0:
		return bad("Backends", "", "want at least one")
	case strings.ContainsRune(c.ServersFile, 0):
		return bad("ServersFile", c.ServersFile, "holds a NUL byte")
	}
	pools, names := map[health.Pool]int{}, map[string]int{}
	for i, b := range c.Backends {
		at := func(f string) string { return fmt.Sprintf("Backends[%d].%s", i, f) }
		if b.Pool == "" {
			return bad(at("Pool"), b.Pool, "is empty")
		}
		if j, ok := pools[b.Pool]; ok {
			return bad(at("Pool"), b.Pool, fmt.Sprintf("is that of Backends[%d] too", j))
		}
		pools[b.Pool] = i
		if !nameChars(b.Backend) {
			return bad(at("Backend"), b.Backend, "want letters, digits and . : _ -")
		}
		if j, ok := names[b.Backend]; ok {
			return bad(at("Backend"), b.Backend, fmt.Sprintf("is that of Backends[%d] too", j))
		}
		names[b.Backend] = i
		if !b.Owned {
			switch {
			case b.Defaults != "":
				return bad(at("Defaults"), b.Defaults, "only an owned backend's section is written")
			case len(b.Lines) > 0:
				return bad(at("Lines"), b.Lines[0], "only an owned backend's section is written")
			case b.ServerOptions != "":
				return bad(at("ServerOptions"), b.ServerOptions, "only an owned backend's servers are written")
			}
			continue
		}
		if c.ServersFile == "" {
			return bad("ServersFile", "", fmt.Sprintf("is needed, %s is owned", at("Backend")))
		}
		if filepath.Base(c.ServersFile) == "." || strings.HasSuffix(c.ServersFile, string(filepath.Separator)) {
			return bad("ServersFile", c.ServersFile, "want a file, not a directory")
		}
		if b.Defaults != "" && !nameChars(b.Defaults) {
			return bad(at("Defaults"), b.Defaults, "want letters, digits and . : _ -")
		}
		for j, l := range b.Lines {
			if why := badLine(l); why != "" {
				return bad(fmt.Sprintf("%s[%d]", at("Lines"), j), l, why)
			}
		}
		if why := badOptions(b.ServerOptions); why != "" {
			return bad(at("ServerOptions"), b.ServerOptions, why)
		}
	}
	return nil
}

func badLine(l string) string {
	f := strings.Fields(l)
	switch {
	case len(f) == 0:
		return "is empty"
	case strings.IndexFunc(l, func(r rune) bool { return r != '\t' && (r < ' ' || r == 0x7f) }) >= 0:
		return "holds a line break or another control character"
	case slices.Contains(sectionWords, f[0]):
		return "begins another section"
	case strings.HasPrefix(f[0], "."):
		return "is a directive of the whole file"
	case strings.ContainsAny(f[0], `"'\$#`):
		return "the first word is quoted, escaped or a comment, which would hide what it is"
	case len(f) > 1 && f[0] == "option" && strings.ContainsAny(f[1], `"'\$`):
		return "the option is quoted or escaped, which would hide what it is"
	case len(f) > 1 && f[0] == "option" && f[1] == "persist":
		return "it sends to servers in maintenance"
	}
	return lineWords[f[0]]
}

func badOptions(o string) string {
	for _, r := range o {
		if r < ' ' || r > '~' || strings.ContainsRune(";\\\"'#$<`", r) {
			return fmt.Sprintf("holds %q, which means something in HAProxy's command line or configuration", r)
		}
	}
	words := strings.Fields(o)
	if len(words) > maxOptionWords || len(o) > maxCommand/4 {
		return fmt.Sprintf("want at most %d words and %d bytes", maxOptionWords, maxCommand/4)
	}
	for _, w := range words {
		if why := optionWords[w]; why != "" {
			return fmt.Sprintf("%s: %s", w, why)
		}
	}
	return ""
}
