package haproxy

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/lameduck-io/lameduck/pkg/health"
)

const namePrefix = "ld-"

// maxUID bounds a UID in a server's name. Kubernetes' are 36 characters; static pods' are 32
// hexadecimal digits.
const maxUID = 128

// serverName writes a target as the name of a server: ld-<uid>-<ip>-<port>. The UID is empty for an
// endpoint without a pod. HAProxy allows letters, digits and . : _ - in names (invalid_char in its
// src/tools.c) and sets no limit on their length.
func serverName(t health.Target) (string, error) {
	if len(t.UID) > maxUID || t.UID != "" && !nameChars(string(t.UID)) {
		return "", fmt.Errorf("pod UID %q: want at most %d letters, digits and . : _ -", t.UID, maxUID)
	}
	a := t.Addr
	if !a.IsValid() || a.Port() == 0 || a.Addr().IsUnspecified() {
		return "", fmt.Errorf("address %q: want an IP address and a port", a)
	}
	if a.Addr().Zone() != "" {
		return "", fmt.Errorf("address %q: HAProxy does not support zones", a)
	}
	return namePrefix + string(t.UID) + "-" + a.Addr().String() + "-" + strconv.Itoa(int(a.Port())), nil
}

// parseName is the inverse of serverName. It reports false for every name that serverName does not
// write.
func parseName(name string) (health.Target, bool) {
	uid, port, _ := cutLast(strings.TrimPrefix(name, namePrefix))
	uid, ip, ok := cutLast(uid)
	number, _ := strconv.ParseUint(port, 10, 16)
	addr, _ := netip.ParseAddr(ip)
	t := health.Target{UID: health.UID(uid), Addr: netip.AddrPortFrom(addr, uint16(number))}
	if again, err := serverName(t); !ok || err != nil || again != name {
		return health.Target{}, false
	}
	return t, true
}

func cutLast(s string) (before, after string, ok bool) {
	i := strings.LastIndexByte(s, '-')
	return s[:max(i, 0)], s[i+1:], i >= 0
}

func nameChars(s string) bool {
	return s != "" && strings.IndexFunc(s, func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && !strings.ContainsRune(".:_-", c)
	}) < 0
}
