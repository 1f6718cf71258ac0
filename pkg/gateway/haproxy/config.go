package haproxy

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	// commandTimeout bounds one command, and sealTimeout the question whether an old process is
	// sealed, which delays the reading of all others.
	commandTimeout = 2 * time.Second
	sealTimeout    = 500 * time.Millisecond
	// rewriteEvery is how often a servers file that could not be written is tried again while the
	// gateway is read.
	rewriteEvery = time.Second
	// maxSocketPath is the maximum length of a unix socket's path on Linux, in bytes.
	maxSocketPath = 107
	// maxOptionWords keeps "add server" below the 64 words that HAProxy reads of one command.
	maxOptionWords = 48
)

// Config locates one HAProxy and lists the backends that the agent writes.
type Config struct {
	// MasterSocket is the path of HAProxy's master socket: haproxy -W -S PATH. Its level must be
	// admin, which is the default.
	MasterSocket string `json:"masterSocket"`
	// ServersFile is the file with the sections of the backends, which the agent writes and HAProxy
	// loads by an additional -f, the last one. It is written at the agent's start if it does not
	// exist, so the agent must start before HAProxy.
	ServersFile string `json:"serversFile"`
	// Backends are the backends that the agent writes. At least one is required.
	Backends []Backend `json:"backends"`
}

// Backend is one backend of HAProxy and the Service port that feeds it. It is a pool of the same
// name.
type Backend struct {
	// Backend is the name of HAProxy's backend section.
	Backend string `json:"backend"`
	// Service is namespace/name of the Service that feeds it.
	Service string `json:"service"`
	// Port is the name of the Service's port. Empty: the only one.
	Port string `json:"port,omitempty"`
	// Lines are the lines of the section: mode, timeout connect and timeout server, which are
	// required, and balance, options, other timeouts. They are written as they are. The section
	// inherits nothing from defaults sections.
	Lines []string `json:"lines,omitempty"`
	// ServerOptions are words for every server of the backend, such as "maxconn 50". HAProxy
	// takes fewer words for servers added at run time than in the configuration.
	ServerOptions string `json:"serverOptions,omitempty"`
	// HealthCheck is how the agent probes the targets (docs/health.md). The Service's annotation
	// lameduck.io/health-check takes precedence over it. If both are absent, the targets are not
	// probed.
	HealthCheck json.RawMessage `json:"healthCheck,omitempty"`
}

func (b Backend) pool() health.Pool { return health.Pool(b.Backend) }

func keyOf(i int) string { return fmt.Sprintf("backends[%d]", i) }

// sectionWords are the first words of sections in HAProxy's configuration. A line that begins with
// one would end the backend's section.
var sectionWords = []string{
	"backend", "cache", "crt-store", "defaults", "dynamic-update", "fcgi-app", "frontend", "global", "http-errors",
	"listen", "log-forward",
	"mailers", "peers", "program", "resolvers", "ring", "traces", "userlist", "acme", "healthcheck", "log-profile",
}

// required are the beginnings of lines that each section needs, because it inherits nothing.
var required = []string{"mode", "timeout connect", "timeout server"}

// lineWords are the words that no line of a section may begin with, each with the reason.
var lineWords = map[string]string{
	"server":                      "the agent writes the servers",
	"server-template":             "the agent writes the servers",
	"default-server":              "servers added at run time do not take it; use serverOptions",
	"dispatch":                    "it sends to an address whatever the servers' states are",
	"force-persist":               "it sends to servers in maintenance",
	"load-server-state-from-file": "the servers file is the state",
	"disabled":                    "a disabled backend serves nothing",
}

// optionWords are the words that ServerOptions may not contain, each with the reason.
var optionWords = map[string]string{
	"agent-check":    "an agent's answer can put a server in maintenance back into service",
	"disabled":       "the agent decides",
	"enabled":        "the agent decides",
	"id":             "ids are unique in a backend",
	"track":          "maintenance would follow that of another server",
	"on-marked-down": "shutdown-sessions also ends requests when a server is put into maintenance",
	"cookie":         "HAProxy refuses it for servers added at run time",
	"resolvers":      "targets are addresses",
	"init-addr":      "targets are addresses",
}

// Check implements gateway.Kind.
func (c *Config) Check() []error {
	var errs []error
	must := func(ok bool, field string, value any, why string) {
		if !ok {
			errs = append(errs, fmt.Errorf("%s %q: %s", field, fmt.Sprint(value), why))
		}
	}
	must(c.MasterSocket != "", "masterSocket", "", "required")
	must(len(c.MasterSocket) <= maxSocketPath, "masterSocket", c.MasterSocket,
		fmt.Sprintf("%d bytes, a unix socket's path has at most %d", len(c.MasterSocket), maxSocketPath))
	must(!strings.ContainsRune(c.MasterSocket, 0), "masterSocket", c.MasterSocket, "holds a NUL byte")
	must(!strings.ContainsRune(c.ServersFile, 0), "serversFile", c.ServersFile, "holds a NUL byte")
	must(c.ServersFile != "", "serversFile", "", "required")
	must(c.ServersFile == "" || filepath.Base(c.ServersFile) != "." &&
		!strings.HasSuffix(c.ServersFile, string(filepath.Separator)), "serversFile", c.ServersFile,
		"want a file, not a directory")
	must(len(c.Backends) > 0, "backends", "", "at least one is needed")
	names := map[string]int{}
	for i, b := range c.Backends {
		at := func(f string) string { return keyOf(i) + "." + f }
		j, twice := names[b.Backend]
		must(nameChars(b.Backend), at("backend"), b.Backend, "want letters, digits and . : _ -")
		must(!twice, at("backend"), b.Backend, "is that of "+keyOf(j)+" too")
		names[b.Backend] = i
		for j, l := range b.Lines {
			why := badLine(l)
			must(why == "", fmt.Sprintf("%s[%d]", at("lines"), j), l, why)
		}
		for _, begin := range required {
			must(b.has(begin), at("lines"), begin, "missing: the section inherits nothing from defaults sections of "+
				"HAProxy's files")
		}
		static, why := b.static()
		must(why == "", at("lines"), static, why)
		why = badOptions(b.ServerOptions)
		must(why == "", at("serverOptions"), b.ServerOptions, why)
	}
	return errs
}

// has reports whether a line begins with these words.
func (b *Backend) has(words string) bool {
	return slices.ContainsFunc(b.Lines, func(l string) bool {
		return strings.HasPrefix(strings.Join(strings.Fields(l), " "), words+" ")
	})
}

// static returns the line by which HAProxy would add no server at run time, and why.
func (b *Backend) static() (line, why string) {
	for _, l := range b.Lines {
		f := append(strings.Fields(l), "", "")
		algorithm, _, _ := strings.Cut(f[1], "(")
		switch {
		case f[0] != "balance":
		case algorithm == "static-rr":
			return l, "no servers can be added at run time: use roundrobin"
		case slices.Contains(hashes, algorithm) && !slices.ContainsFunc(b.Lines, consistent):
			return l, "no servers can be added at run time: add the line hash-type consistent"
		}
	}
	return "", ""
}

func consistent(line string) bool {
	f := strings.Fields(line)
	return len(f) > 1 && f[0] == "hash-type" && f[1] == "consistent"
}

// hashes are the values of balance that need a consistent hash for servers at run time.
var hashes = []string{"source", "uri", "url_param", "hdr", "rdp-cookie", "hash"}

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
