package health

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"sigs.k8s.io/yaml"
)

// CheckAnnotation is the annotation of a Service that holds its check, as [ParseCheck] reads it.
// The agent's file accepts the same text. For the targets of a named port, the annotation
// [CheckAnnotationOf] of the port takes precedence.
const CheckAnnotation = "lameduck.io/health-check"

// CheckAnnotationOf is the annotation of a Service that holds the check of the targets of one of
// its ports. For a port without a name, it is [CheckAnnotation].
func CheckAnnotationOf(port string) string {
	if port == "" {
		return CheckAnnotation
	}
	return CheckAnnotation + "." + port
}

// Limits of a check.
const (
	// minInterval prevents one Service from demanding more probes than all others together.
	minInterval = time.Second
	// maxInterval is one hour: an older verdict is of no use.
	maxInterval = time.Hour
	// minTimeout is enough for two round trips to a target on another node.
	minTimeout = 10 * time.Millisecond
	// maxThreshold is lua-resty-healthcheck's.
	maxThreshold = 254
	// maxCheckText bounds the annotation, and so what is sent in each probe.
	maxCheckText = 4096
)

// checkText is a check as an operator writes it. A nil pointer is the default.
type checkText struct {
	Protocol   string            `json:"protocol"`
	Path       *string           `json:"path"`
	Host       *string           `json:"host"`
	Headers    map[string]string `json:"headers"`
	ServerName *string           `json:"serverName"`
	Verify     *bool             `json:"verify"`
	Service    *string           `json:"service"`
	Statuses   []any             `json:"statuses"`
	Port       *int              `json:"port"`
	Interval   *string           `json:"interval"`
	Timeout    *string           `json:"timeout"`
	Healthy    struct {
		Successes *int `json:"successes"`
	} `json:"healthy"`
	Unhealthy struct {
		HTTPFailures *int `json:"httpFailures"`
		TCPFailures  *int `json:"tcpFailures"`
		Timeouts     *int `json:"timeouts"`
	} `json:"unhealthy"`
}

// DefaultCheck returns the check that an empty object stands for: GET / each 10 s with a timeout of
// 1 s. Timeout, path, verification and thresholds are the defaults of lua-resty-healthcheck, which
// has none for the interval. Statuses 200 to 399 are successes and all others failures, as for the
// kubelet. lua-resty-healthcheck counts 200 and 302 as successes, 404, 429 and 500 to 505 as
// failures, and ignores the rest.
func DefaultCheck(p Protocol) Check {
	c := Check{
		Protocol: p, Interval: 10 * time.Second, Timeout: time.Second,
		Thresholds: Thresholds{Successes: 2, HTTPFailures: 5, TCPFailures: 2, Timeouts: 3},
	}
	if p == HTTP || p == HTTPS {
		c.Path = "/"
		for s := 200; s < 400; s++ {
			c.Statuses.Add(s)
		}
	}
	c.Verify = p == HTTPS
	return c
}

// ParseCheck reads a check from YAML or JSON: an object with the keys
//
//	protocol    http (default), https, tcp or grpc
//	path        of HTTP and HTTPS, /
//	host        the Host header (of gRPC :authority), the target's address
//	headers     further headers, an object
//	serverName  SNI of HTTPS and the name that is verified, host
//	verify      the certificate of HTTPS, true
//	service     that gRPC asks about, the server as a whole
//	statuses    of HTTP and HTTPS that are successes, numbers and ranges: [200-399]
//	port        that is probed, the target's own
//	interval    1s to 1h, 10s
//	timeout     10ms to interval, 1s
//	healthy     {successes: 2}
//	unhealthy   {httpFailures: 5, tcpFailures: 2, timeouts: 3}
//
// Thresholds are 0 (never) to 254, healthy.successes at least 1. ParseCheck refuses an unknown key,
// a key that the protocol does not use, and a value out of bounds. Its error names the key. The
// empty text is the zero Check, which probes nothing.
func ParseCheck(text string) (Check, error) {
	if strings.TrimSpace(text) == "" {
		return Check{}, nil
	}
	if len(text) > maxCheckText {
		return Check{}, fmt.Errorf("health check of %d bytes: at most %d are read", len(text), maxCheckText)
	}
	var t checkText
	if err := yaml.UnmarshalStrict([]byte(text), &t); err != nil {
		return Check{}, fmt.Errorf(
			"health check: %s; it is an object such as {path: /healthz, interval: 5s}",
			plain(err),
		)
	}
	c, err := t.check()
	if err != nil {
		return Check{}, fmt.Errorf("health check: %w", err)
	}
	return c, nil
}

// plain removes the names of Go types from an error of the YAML library.
func plain(err error) string {
	s := strings.TrimPrefix(err.Error(), "error unmarshaling JSON: while decoding JSON: json: ")
	s = strings.TrimPrefix(s, "error converting YAML to JSON: ")
	if kind, _, ok := strings.Cut(s, " into Go value of type "); ok {
		return "no object but a " + strings.TrimPrefix(kind, "cannot unmarshal ")
	}
	if field, ok := strings.CutPrefix(s, "cannot unmarshal "); ok {
		if kind, path, ok := strings.Cut(field, " into Go struct field "); ok {
			path, _, _ = strings.Cut(path, " of type ")
			_, path, _ = strings.Cut(path, ".")
			return fmt.Sprintf("%s: no %s is allowed there", path, kind)
		}
	}
	return s
}

func (t *checkText) check() (Check, error) {
	p := HTTP
	for p.String() != cmp.Or(t.Protocol, "http") {
		if p++; p > GRPC {
			return Check{}, fmt.Errorf("protocol %q: it is http, https, tcp or grpc", t.Protocol)
		}
	}
	c := DefaultCheck(p)
	if err := t.refuseUnused(p); err != nil {
		return Check{}, err
	}
	set(&c.Path, t.Path)
	set(&c.Host, t.Host)
	set(&c.ServerName, t.ServerName)
	set(&c.Verify, t.Verify)
	set(&c.Service, t.Service)
	if err := joinHeaders(&c, t.Headers); err != nil {
		return Check{}, err
	}
	if t.Statuses != nil {
		if err := parseStatuses(&c.Statuses, t.Statuses); err != nil {
			return Check{}, err
		}
	}
	if t.Port != nil {
		if *t.Port < 1 || *t.Port > 65535 {
			return Check{}, fmt.Errorf("port %d: it is 1 to 65535; leave it out to probe the target's own", *t.Port)
		}
		c.Port = uint16(*t.Port)
	}
	if err := parseDuration(&c.Interval, "interval", t.Interval); err != nil {
		return Check{}, err
	}
	if err := parseDuration(&c.Timeout, "timeout", t.Timeout); err != nil {
		return Check{}, err
	}
	for _, n := range []struct {
		name string
		to   *uint8
		text *int
	}{
		{"healthy.successes", &c.Thresholds.Successes, t.Healthy.Successes},
		{"unhealthy.httpFailures", &c.Thresholds.HTTPFailures, t.Unhealthy.HTTPFailures},
		{"unhealthy.tcpFailures", &c.Thresholds.TCPFailures, t.Unhealthy.TCPFailures},
		{"unhealthy.timeouts", &c.Thresholds.Timeouts, t.Unhealthy.Timeouts},
	} {
		if n.text == nil {
			continue
		}
		if *n.text < 0 || *n.text > maxThreshold {
			return Check{}, fmt.Errorf("%s %d: it is 0 (never) to %d", n.name, *n.text, maxThreshold)
		}
		*n.to = uint8(*n.text)
	}
	return c, c.validate()
}

// refuseUnused returns an error that names a key which a check with protocol p does not use: the
// operator who wrote the key expects an effect.
func (t *checkText) refuseUnused(p Protocol) error {
	web := p == HTTP || p == HTTPS
	for _, k := range []struct {
		name     string
		given    bool
		useful   bool
		protocol string
	}{
		{"path", t.Path != nil, web, "http and https"},
		{"host", t.Host != nil, p != TCP, "http, https and grpc"},
		{"headers", t.Headers != nil, web, "http and https"},
		{"serverName", t.ServerName != nil, p == HTTPS, "https"},
		{"verify", t.Verify != nil, p == HTTPS, "https"},
		{"service", t.Service != nil, p == GRPC, "grpc"},
		{"statuses", t.Statuses != nil, web, "http and https"},
		{"unhealthy.httpFailures", t.Unhealthy.HTTPFailures != nil, p != TCP, "http, https and grpc"},
	} {
		if k.given && !k.useful {
			return fmt.Errorf("%s: it has a meaning for %s, not for %s; leave it out", k.name, k.protocol, p)
		}
	}
	return nil
}

func set[T any](to *T, from *T) {
	if from != nil {
		*to = *from
	}
}

func parseDuration(to *time.Duration, name string, text *string) error {
	if text == nil {
		return nil
	}
	d, err := time.ParseDuration(*text)
	if err != nil {
		return fmt.Errorf("%s %q: it is a duration with a unit, such as 5s or 500ms", name, *text)
	}
	*to = d
	return nil
}

func joinHeaders(c *Check, headers map[string]string) error {
	var b strings.Builder
	names := slices.Sorted(maps.Keys(headers))
	for i, name := range names {
		if n := slices.IndexFunc(names[:i], func(other string) bool { return strings.EqualFold(other, name) }); n >= 0 {
			return fmt.Errorf("headers: %s and %s are the same header, which is sent once", names[n], name)
		}
		switch strings.ToLower(name) {
		case "host":
			return fmt.Errorf("headers: %s has a key of its own, host", name)
		case "connection", "keep-alive", "content-length", "transfer-encoding", "upgrade", "expect", "te", "trailer":
			return fmt.Errorf("headers: %s has no meaning in a probe, one GET on a connection; leave it out", name)
		}
		if !token(name) || !printable(headers[name], true) {
			return fmt.Errorf(
				"headers: %q: a name has letters, digits and dashes, a value printable ASCII",
				name+": "+headers[name],
			)
		}
		fmt.Fprintf(&b, "%s: %s\r\n", name, headers[name])
	}
	c.Headers = b.String()
	return nil
}

func parseStatuses(to *Statuses, list []any) error {
	*to = Statuses{}
	for _, v := range list {
		text := fmt.Sprint(v)
		from, upTo, isRange := strings.Cut(text, "-")
		if !isRange {
			upTo = from
		}
		first, err1 := strconv.ParseUint(strings.TrimSpace(from), 10, 16)
		last, err2 := strconv.ParseUint(strings.TrimSpace(upTo), 10, 16)
		if err1 != nil || err2 != nil || first < 200 || last > 599 || first > last {
			return fmt.Errorf(
				"statuses: %q: each is a number or a range within 200 to 599, such as 204 or 200-399",
				text,
			)
		}
		for s := first; s <= last; s++ {
			to.Add(int(s))
		}
	}
	return nil
}

// validate returns an error that names the wrong key and the remedy. Nil: c is valid.
func (c Check) validate() error {
	web := c.Protocol == HTTP || c.Protocol == HTTPS
	switch {
	case c.Interval < minInterval || c.Interval > maxInterval:
		return fmt.Errorf("interval %s: it is %s to %s", c.Interval, minInterval, maxInterval)
	case c.Timeout < minTimeout:
		return fmt.Errorf("timeout %s: it is at least %s", c.Timeout, minTimeout)
	case c.Timeout > c.Interval:
		// Otherwise a target that does not answer would be probed less often than one that does.
		return fmt.Errorf(
			"timeout %s: it is at most the interval, %s; lengthen the one or shorten the other",
			c.Timeout,
			c.Interval,
		)
	case web && (!strings.HasPrefix(c.Path, "/") || !printable(c.Path, false)):
		return fmt.Errorf(
			"path %q: it begins with a slash and has printable ASCII without spaces; write other characters as %%XX",
			c.Path,
		)
	case web && c.Statuses == Statuses{}:
		return errors.New("statuses: no status would be a success; leave it out for 200-399")
	case !printable(c.Host, false) || strings.ContainsAny(c.Host, "/@?#"):
		return fmt.Errorf("host %q: it is a name or an address, with a port or without", c.Host)
	case !printable(c.ServerName, false) || strings.ContainsAny(c.ServerName, "/@?#:") ||
		net.ParseIP(c.ServerName) != nil:
		return fmt.Errorf(
			"serverName %q: it is a name, without a port; an address is verified if there is no name",
			c.ServerName,
		)
	case !utf8.ValidString(c.Service) || len(c.Service) > 1024:
		return errors.New("service: it is UTF-8 of at most 1024 bytes")
	case len(c.Path)+len(c.Host)+len(c.ServerName)+len(c.Headers) > maxCheckText:
		return fmt.Errorf("path, host and headers: together at most %d bytes", maxCheckText)
	case c.Thresholds.Successes == 0:
		// Otherwise no unhealthy target could recover, and no new one would get a verdict.
		return errors.New("healthy.successes: it is at least 1; leave out the check to probe nothing")
	}
	return nil
}

// printable reports whether s consists of visible ASCII characters, and of spaces if these are
// allowed. So s cannot end a line.
func printable(s string, spaces bool) bool {
	return !strings.ContainsFunc(s, func(c rune) bool { return c <= ' ' && (c != ' ' || !spaces) || c >= 0x7f })
}

func token(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(c rune) bool {
		return ('a' > c || c > 'z') && ('A' > c || c > 'Z') && ('0' > c || c > '9') &&
			!strings.ContainsRune("!#$%&'*+-.^_`|~", c)
	})
}
