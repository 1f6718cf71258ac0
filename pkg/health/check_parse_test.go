package health

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestParseCheck(t *testing.T) {
	with := func(p Protocol, change func(*Check)) Check {
		c := DefaultCheck(p)
		change(&c)
		return c
	}
	for text, want := range map[string]Check{
		"": {}, " \n": {}, "{}": DefaultCheck(HTTP), "protocol: tcp": DefaultCheck(TCP),
		"protocol: grpc\nservice: shop": with(GRPC, func(c *Check) { c.Service = "shop" }),
		"protocol: https\nverify: false\nserverName: shop.example\nhost: shop.example:8443": with(HTTPS,
			func(c *Check) {
				c.Verify, c.ServerName, c.Host = false, "shop.example", "shop.example:8443"
			}),
		`{"path": "/h", "port": 8080, "interval": "2s", "timeout": "500ms", "statuses": [204, "300-301", 418]}`: with(
			HTTP, func(c *Check) {
				c.Path, c.Port, c.Interval, c.Timeout = "/h", 8080, 2*time.Second, 500*time.Millisecond
				c.Statuses = Statuses{}
				for _, s := range []int{204, 300, 301, 418} {
					c.Statuses.Add(s)
				}
			}),
		"headers: {X-B: two words, X-A: '1'}\nhealthy: {successes: 1}\n" +
			"unhealthy: {httpFailures: 0, tcpFailures: 254}": with(HTTP, func(c *Check) {
			c.Headers = "X-A: 1\r\nX-B: two words\r\n"
			c.Thresholds = Thresholds{Successes: 1, HTTPFailures: 0, TCPFailures: 254, Timeouts: 3}
		}),
	} {
		got, err := ParseCheck(text)
		if err != nil {
			t.Errorf("%q: %v", text, err)
			continue
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%q: %s", text, diff)
		}
	}
}

// What is refused is named, and so is the way out.
func TestParseCheckRefuses(t *testing.T) {
	for text, want := range map[string][]string{
		"nonsense":                                    {"an object such as"},
		"[]":                                          {"an object such as"},
		"{path":                                       {"an object such as"},
		"paht: /":                                     {`"paht"`},
		"path: /\npath: /b":                           {"path", "already"},
		"unhealthy: {failures: 3}":                    {`"failures"`},
		"protocol: udp":                               {`"udp"`, "http, https, tcp or grpc"},
		"protocol: HTTP":                              {`"HTTP"`, "http, https"},
		"path: healthz":                               {"path", "slash"},
		"path: /a b":                                  {"path", "%XX"},
		"path: \"/a\\r\\nX: y\"":                      {"path"},
		"host: \"a\\r\\nX: y\"":                       {"host"},
		"host: http://a":                              {"host"},
		"headers: {X: \"a\\r\\nY: b\"}":               {"headers"},
		"headers: {\"X\\r\\n\": a}":                   {"headers"},
		"headers: {\"\": a}":                          {"headers"},
		"headers: {host: a}":                          {"headers", "a key of its own, host"},
		"headers: {Connection: close}":                {"headers", "no meaning"},
		"headers: {Content-Length: '1'}":              {"headers", "Content-Length"},
		"headers: {X-A: a, x-a: b}":                   {"headers", "x-a", "X-A"},
		"headers: {X-A: [a, b]}":                      {"headers", "array"},
		"protocol: https\nserverName: 10.0.0.1":       {"serverName", "a name"},
		"protocol: https\nserverName: a:443":          {"serverName", "without a port"},
		"serverName: a":                               {"serverName", "https, not for http"},
		"protocol: tcp\npath: /":                      {"path", "not for tcp"},
		"protocol: tcp\nunhealthy: {httpFailures: 1}": {"unhealthy.httpFailures", "not for tcp"},
		"protocol: grpc\nstatuses: [200]":             {"statuses", "not for grpc"},
		"service: a":                                  {"service", "grpc"},
		"statuses: []":                                {"statuses", "200-399"},
		"statuses: [600]":                             {"statuses", `"600"`},
		"statuses: [100]":                             {"statuses", `"100"`},
		"statuses: [299-200]":                         {"statuses", `"299-200"`},
		"statuses: [2xx]":                             {"statuses", `"2xx"`, "200-399"},
		"statuses: 200":                               {"statuses"},
		"port: 0":                                     {"port 0", "leave it out"},
		"port: 65536":                                 {"port 65536"},
		"port: http":                                  {"port", "string"},
		"interval: 10":                                {"interval", "with a unit"},
		"interval: ten":                               {"interval", "5s"},
		"interval: 500ms\ntimeout: 100ms":             {"interval 500ms", "1s"},
		"interval: 2h":                                {"interval 2h"},
		"timeout: 0s":                                 {"timeout 0s", "10ms"},
		"timeout: 11s":                                {"timeout 11s", "lengthen the one or shorten the other"},
		"healthy: {successes: 0}":                     {"healthy.successes", "at least 1"},
		"unhealthy: {timeouts: 255}":                  {"unhealthy.timeouts 255", "254"},
		"unhealthy: {timeouts: -1}":                   {"unhealthy.timeouts -1"},
		"path: /" + strings.Repeat("a", 5000):         {"5007 bytes", "4096"},
	} {
		got, err := ParseCheck(text)
		if err == nil {
			t.Errorf("%q is taken for %+v", text, got)
			continue
		}
		for _, w := range want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%.40q: %v; want %q in it", text, err, w)
			}
		}
		if strings.Contains(err.Error(), "Go ") || strings.Contains(err.Error(), "checkText") {
			t.Errorf("%.40q: %v: speaks of Go", text, err)
		}
	}
}

// Nothing of what is taken can end the line it is sent in.
func FuzzParseCheck(f *testing.F) {
	f.Add("{path: /healthz, headers: {X: y}, statuses: [200-399, 418]}")
	f.Add("protocol: https\nserverName: a\nverify: false")
	f.Fuzz(func(t *testing.T, text string) {
		c, err := ParseCheck(text)
		if err != nil {
			return
		}
		if strings.ContainsAny(c.Path+c.Host+c.ServerName, "\r\n \x00") ||
			strings.Count(c.Headers, "\n") != strings.Count(c.Headers, "\r\n") ||
			strings.Contains(c.Headers, "\r\n\r\n") ||
			strings.Count(c.Headers, "\n") > strings.Count(text, ":") {
			t.Fatalf("%+v", c)
		}
	})
}
