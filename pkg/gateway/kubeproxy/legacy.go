package kubeproxy

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The legacy iptables have no notifications. While there is a watch, they are read at most once per
// legacyPause, and for at most a twentieth of the time. Otherwise the agent checks every legacyLook
// whether they exist and whether kube-proxy has written them.
const (
	legacyPause = 100 * time.Millisecond
	legacyShare = 19
	legacyLook  = time.Second
)

// legacyState is the state of knowledge about the legacy rules of a family.
type legacyState uint8

const (
	legacyAbsent legacyState = iota
	legacyUnread             // they exist, and what they are is not known: neither is where packets go
	legacyRead
)

// errMoved is returned if the size of the rules changed while they were read.
var errMoved = errors.New("the rules changed while they were read")

// legacyLayout is how the kernel lays a rule out, from linux/netfilter_ipv4/ip_tables.h and
// linux/netfilter_ipv6/ip6_tables.h, on machines of 64 bits.
type legacyLayout struct {
	domain, level         int
	targetOffset, minimum int
	names                 string
}

var legacyLayouts = map[uint8]legacyLayout{
	unix.NFPROTO_IPV4: {unix.AF_INET, unix.IPPROTO_IP, 88, 112, "ip_tables_names"},
	unix.NFPROTO_IPV6: {unix.AF_INET6, unix.IPPROTO_IPV6, 140, 168, "ip6_tables_names"},
}

const (
	legacyInfo, legacyEntries = 64, 65 // IPT_SO_GET_INFO, IPT_SO_GET_ENTRIES; the same for IPv6

	legacyInfoSize   = 84 // struct ipt_getinfo
	legacyHeaderSize = 40 // struct ipt_get_entries
	legacyHooks      = 5
	hookPrefix       = "hook " // of the names, which chains do not have with a space, of those that the kernel enters
)

// legacyExists reports whether this process's network namespace has legacy rules for NAT. A request
// to the kernel for the rules would create the table.
func legacyExists(family uint8) bool {
	b, err := os.ReadFile("/proc/thread-self/net/" + legacyLayouts[family].names)
	return err == nil && strings.Contains("\n"+string(b), "\n"+natTable+"\n")
}

func readLegacy(family uint8) (*table, error) {
	layout := legacyLayouts[family]
	// Not a raw socket, as iptables opens it: that needs CAP_NET_RAW, and this CAP_NET_ADMIN alone.
	fd, err := unix.Socket(layout.domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a socket: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	info := make([]byte, legacyInfoSize)
	copy(info, natTable)
	if err := getsockopt(fd, layout.level, legacyInfo, info); err != nil {
		return nil, fmt.Errorf("read the size of the legacy rules: %w", err)
	}
	size := binary.NativeEndian.Uint32(info[legacyInfoSize-4:])
	entries := make([]byte, legacyHeaderSize+int(size))
	copy(entries, natTable)
	binary.NativeEndian.PutUint32(entries[32:], size)
	if err := getsockopt(fd, layout.level, legacyEntries, entries); err != nil {
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINVAL) {
			err = errMoved
		}
		return nil, fmt.Errorf("read the legacy rules: %w", err)
	}
	return decodeLegacy(family, info, entries[legacyHeaderSize:])
}

func getsockopt(fd, level, option int, b []byte) error {
	length := uint32(len(b))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&length)), 0)
	runtime.KeepAlive(b)
	if errno != 0 {
		return errno
	}
	return nil
}

// decodeLegacy returns the rules as a graph. A chain begins where the kernel enters, or after a
// rule with the target ERROR, which contains the chain's name. Rules jump to the offset of the
// chain's first rule.
func decodeLegacy(family uint8, info, b []byte) (*table, error) {
	layout := legacyLayouts[family]
	id := tableID{family, legacyTable}
	t := newTableGraph(id)
	if len(info) != legacyInfoSize {
		return nil, errShort
	}
	hooks := binary.NativeEndian.Uint32(info[32:])
	starts := map[uint32]string{}
	for hook := range legacyHooks {
		if hooks&(1<<hook) != 0 {
			starts[binary.NativeEndian.Uint32(info[36+4*hook:])] = fmt.Sprint(hookPrefix, hook)
		}
	}
	// each calls f for each rule with the offsets of that rule and of the next one, the name of its
	// target, and the target's data.
	each := func(f func(at, next uint32, name string, data []byte) error) error {
		for at := 0; at < len(b); {
			rest := b[at:]
			if len(rest) < layout.minimum {
				return errShort
			}
			target := int(binary.NativeEndian.Uint16(rest[layout.targetOffset:]))
			next := int(binary.NativeEndian.Uint16(rest[layout.targetOffset+2:]))
			if target < layout.minimum || next < target+32 || next > len(rest) {
				return errShort
			}
			name, _, _ := bytes.Cut(rest[target+2:target+31], []byte{0})
			if err := f(uint32(at), uint32(at+next), string(name), rest[target+32:next]); err != nil {
				return err
			}
			at += next
		}
		return nil
	}
	if err := each(func(_, next uint32, name string, data []byte) error {
		if name == "ERROR" {
			chain, _, _ := bytes.Cut(data, []byte{0})
			starts[next] = string(chain)
		}
		return nil
	}); err != nil {
		return nil, err
	}
	for _, name := range starts {
		t.apply(&change{kind: newChain, table: id, name: name, base: strings.HasPrefix(name, hookPrefix)})
	}
	chain := ""
	err := each(func(at, _ uint32, name string, data []byte) error {
		if start, ok := starts[at]; ok {
			chain = start
		}
		var r rule
		switch name {
		case "":
			if len(data) < 4 {
				return errShort
			}
			if verdict := int32(binary.NativeEndian.Uint32(data)); verdict >= 0 {
				if to, ok := starts[uint32(verdict)]; ok {
					r.jumps = append(r.jumps, to)
				}
			}
		case "DNAT":
			dest, err := decodeTarget(family, data)
			if err != nil {
				return err
			}
			r.dests = append(r.dests, dest)
		}
		t.apply(&change{kind: newRule, table: id, name: chain, handle: uint64(at), rule: r})
		return nil
	})
	return t, err
}

// pollLegacy reads the legacy rules while there is a watch, until ctx is done.
func (o *Observer) pollLegacy(ctx context.Context) {
	for {
		began := time.Now()
		pause := legacyLook
		if o.readLegacyOnce() {
			pause = max(legacyPause, legacyShare*time.Since(began))
		}
		select {
		case <-ctx.Done():
			return
		case <-o.wakeLegacy:
		case <-time.After(pause):
		}
	}
}

// readLegacyOnce reads the legacy rules for watches, or to see whether kube-proxy has written them.
// It reports whether there are both a watch and rules.
func (o *Observer) readLegacyOnce() (again bool) {
	o.mu.Lock()
	watched, whole := len(o.watches) > 0, maps.Clone(o.legacyWhole)
	o.mu.Unlock()
	for _, family := range families {
		state, graph := legacyAbsent, newTableGraph(tableID{family, legacyTable})
		was, failed := o.legacyFailed[family], "" // written by this goroutine alone
		if !legacyExists(family) {
			whole[family] = false
		} else {
			again, state = watched, legacyUnread
			if watched || !whole[family] {
				g, err := readLegacy(family)
				if err == nil {
					whole[family] = g.complete()
				}
				switch {
				case err == nil && watched:
					state, graph = legacyRead, g
				case err != nil && !errors.Is(err, errMoved):
					failed = err.Error()
				}
			}
		}
		if failed != "" && failed != was {
			o.log.Warn("read the legacy rules of iptables: no target can become Removed", "error", failed)
		}
		o.mu.Lock()
		o.legacyFailed[family] = failed
		s := o.sources[tableID{family, legacyTable}]
		s.graph = graph
		if o.legacy[family] = state; state == legacyUnread {
			s.complete, s.lost = false, false // what was there is not known to be gone
		}
		o.legacyWhole[family] = whole[family]
		o.judge(nil)
		o.evaluate(time.Now())
	}
	return again
}

// lookForLegacy marks the families as unread whose legacy rules exist but were not read because
// there was no watch. The caller holds mu.
func (o *Observer) lookForLegacy() {
	for _, family := range families {
		if o.netns == 0 && o.legacy[family] == legacyAbsent && legacyExists(family) {
			o.legacy[family] = legacyUnread
		}
	}
	o.wakeLegacy.Raise()
}
