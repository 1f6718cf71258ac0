package haproxy

import (
	"net/netip"
	"testing"

	"github.com/lameduck-io/lameduck/pkg/health"
)

func key(pool health.Pool, uid, addr string) health.Key {
	return health.Key{Pool: pool, Target: health.Target{UID: health.UID(uid), Addr: netip.MustParseAddrPort(addr)}}
}

func routed(pool health.Pool, uid, addr string) health.Op {
	return health.Op{Key: key(pool, uid, addr), Want: health.WantRouted}
}

func removed(pool health.Pool, uid, addr string) health.Op {
	return health.Op{Key: key(pool, uid, addr), Want: health.WantRemoved}
}

func TestServerName(t *testing.T) {
	for _, c := range []struct{ uid, addr, want string }{
		{"4a8c1f7e-0000-1111-2222-333344445555", "10.0.0.1:80", "ld-4a8c1f7e-0000-1111-2222-333344445555-10.0.0.1-80"},
		{"0123456789abcdef0123456789abcdef", "[fd00::1]:8080", "ld-0123456789abcdef0123456789abcdef-fd00::1-8080"},
		{"a", "[::ffff:1.2.3.4]:65535", "ld-a-::ffff:1.2.3.4-65535"},
		{"1-2-3.4:5_6", "1.2.3.4:5", "ld-1-2-3.4:5_6-1.2.3.4-5"},
		{"ld-a-1.2.3.4-5", "1.2.3.4:5", "ld-ld-a-1.2.3.4-5-1.2.3.4-5"},
		{"", "10.0.0.1:80", "ld--10.0.0.1-80"},
		{"", "[fd00::1]:80", "ld--fd00::1-80"},
		{"a b", "10.0.0.1:80", ""},
		{"a;b", "10.0.0.1:80", ""},
		{"a/b", "10.0.0.1:80", ""},
		{"a\n", "10.0.0.1:80", ""},
		{"a", "10.0.0.1:0", ""},
		{"a", "0.0.0.0:80", ""},
		{"a", "[fe80::1%eth0]:80", ""},
	} {
		k := key("p", c.uid, c.addr)
		got, err := serverName(k.Target)
		if got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%s %s: name %q, %v; want %q", c.uid, c.addr, got, err, c.want)
			continue
		}
		if back, ok := parseName(got); c.want != "" && (!ok || back != k.Target) {
			t.Errorf("%s: parsed back as %v, %v", got, back, ok)
		}
	}
	for _, name := range []string{"", "ld-", "ld-a", "ld-a-1.2.3.4", "ld-1.2.3.4-80", "s1", "ld-a-1.2.3.4-080",
		"ld-a-1.2.3.4-0", "ld-a-FD00::1-80", "ld-a-0:0::1-80", "xld-a-1.2.3.4-80"} {
		if got, ok := parseName(name); ok {
			t.Errorf("%q is taken for the agent's: %v", name, got)
		}
	}
}

func FuzzServerName(f *testing.F) {
	f.Add("4a8c1f7e-0000-1111-2222-333344445555", "10.0.0.1:80")
	f.Add("a", "[fd00::1]:1")
	f.Fuzz(func(t *testing.T, uid, addr string) {
		a, err := netip.ParseAddrPort(addr)
		if err != nil {
			return
		}
		target := health.Target{UID: health.UID(uid), Addr: a}
		name, err := serverName(target)
		if err != nil {
			return
		}
		if !nameChars(name) {
			t.Fatalf("%q is no name for HAProxy", name)
		}
		if back, ok := parseName(name); !ok || back != target {
			t.Fatalf("%v became %q became %v, %v", target, name, back, ok)
		}
	})
}
