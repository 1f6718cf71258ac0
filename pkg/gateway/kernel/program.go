package kernel

import (
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// address is ip:port as the programs read it: IPv4 is mapped into IPv6, the port is in network
// order in the first two bytes.
type address struct {
	IP   [16]byte
	Port [4]byte
}

func addressOf(a netip.AddrPort) address {
	return address{a.Addr().As16(), [4]byte{byte(a.Port() >> 8), byte(a.Port())}}
}

func (a address) addrPort() netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(a.IP).Unmap(), uint16(a.Port[0])<<8|uint16(a.Port[1]))
}

// maxReplacements is how many endpoints stand in for an excluded one.
const maxReplacements = 16

// exclusion is the value of the map excluded.
type exclusion struct {
	// Expires is in nanoseconds since boot. The programs ignore an exclusion that has expired.
	Expires uint64
	// Count is the number of replacements. 0: connections to the excluded address pass.
	Count        uint32
	_            uint32
	Replacements [maxReplacements]address
}

const (
	addressLen     = 20
	atExpires      = 0
	atCount        = 8
	atReplacements = 16
	exclusionLen   = atReplacements + maxReplacements*addressLen
	maxDialing     = 1 << 12
	maxRedirected  = 1 << 14
	maxTargets     = 1 << 16
	tcp            = 6
	opTCPConnect   = 3 // BPF_SOCK_OPS_TCP_CONNECT_CB: the socket is in the kernel's table from here on
	bpfNoPrealloc  = 1
)

// mapSpecs returns the maps. excluded has the exclusions that the programs apply. dialing has, by
// socket cookie, the destinations of sockets between connect() and their entry in the kernel's
// socket table. redirected has, by socket cookie, the excluded addresses that redirected sockets
// were meant for, until they are closed. A connection for which redirected is full is not closed
// later. targets is for agents only: it has the targets of an earlier agent.
func mapSpecs(maxExclusions uint32) map[string]*ebpf.MapSpec {
	hash := func(name string, key, value, entries uint32) *ebpf.MapSpec {
		return &ebpf.MapSpec{Name: name, Type: ebpf.Hash, KeySize: key, ValueSize: value, MaxEntries: entries,
			Flags: bpfNoPrealloc, Pinning: ebpf.PinByName}
	}
	return map[string]*ebpf.MapSpec{
		"excluded":   hash("excluded", addressLen, exclusionLen, maxExclusions),
		"dialing":    hash("dialing", 8, addressLen, maxDialing),
		"redirected": hash("redirected", 8, addressLen, maxRedirected),
		"targets":    hash("targets", addressLen+maxUID+maxPool, 1, maxTargets),
	}
}

// programSpecs returns the programs. They are written in the assembler of cilium/ebpf: this is
// their only source, and nothing generated is committed.
func programSpecs(maps map[string]*ebpf.Map) []*ebpf.ProgramSpec {
	excluded, dialing, redirected := maps["excluded"].FD(), maps["dialing"].FD(), maps["redirected"].FD()
	specs := []*ebpf.ProgramSpec{
		{Name: "ld_released", Type: ebpf.CGroupSock, Instructions: forget([]int{dialing, redirected})},
		{Name: "ld_dialed", Type: ebpf.SockOps, Instructions: forget([]int{dialing},
			asm.LoadMem(asm.R1, asm.R6, 0, asm.Word), asm.JNE.Imm(asm.R1, opTCPConnect, "pass"))},
		{Name: "ld_connect4", Type: ebpf.CGroupSockAddr, Instructions: connect(excluded, dialing, redirected, false)},
		{Name: "ld_connect6", Type: ebpf.CGroupSockAddr, Instructions: connect(excluded, dialing, redirected, true)},
	}
	for i, s := range specs {
		s.AttachType, s.License = attachTypes[i], "Apache-2.0"
	}
	return specs
}

// attachTypes are the attach points of the programs, in the order of attachment. The programs that
// delete notes come first. Otherwise a note that is written earlier would stay, and its target
// would never be Idle.
var attachTypes = []ebpf.AttachType{ebpf.AttachCgroupInetSockRelease, ebpf.AttachCGroupSockOps,
	ebpf.AttachCGroupInet4Connect, ebpf.AttachCGroupInet6Connect}

// Offsets in struct bpf_sock_addr.
const (
	ctxIP4, ctxIP6, ctxPort, ctxProtocol = 4, 8, 24, 36
)

// Offsets in the stack of connect.
const (
	onCookie      = -8
	onDestination = -32 // an address
	onReplacement = -56 // an address
	onRandom      = -64
	onTried       = -72
)

// connect returns the program for connect(). The program first notes the destination of the socket
// and then checks whether that is excluded. In this order, an agent that writes an exclusion and
// then reads the notes misses no connection. The replacement is chosen at random, and is not an
// excluded one.
func connect(excluded, dialing, redirected int, six bool) asm.Instructions {
	note := func(in int, destination int32) asm.Instructions {
		return asm.Instructions{
			asm.LoadMapPtr(asm.R1, in),
			asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, onCookie),
			asm.Mov.Reg(asm.R3, asm.RFP), asm.Add.Imm(asm.R3, destination),
			asm.Mov.Imm(asm.R4, 0),
			asm.FnMapUpdateElem.Call(),
		}
	}
	find := func(destination int32) asm.Instructions {
		return asm.Instructions{
			asm.LoadMapPtr(asm.R1, excluded),
			asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, destination),
			asm.FnMapLookupElem.Call(),
		}
	}
	words := func(n int, one func(int16) asm.Instructions) (all asm.Instructions) {
		for i := range n {
			all = append(all, one(int16(4*i))...)
		}
		return all
	}
	code := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMem(asm.R1, asm.R6, ctxProtocol, asm.Word),
		asm.JNE.Imm(asm.R1, tcp, "pass"),
	}
	if six {
		code = append(code, words(4, func(at int16) asm.Instructions {
			return asm.Instructions{asm.LoadMem(asm.R1, asm.R6, ctxIP6+at, asm.Word),
				asm.StoreMem(asm.RFP, onDestination+at, asm.R1, asm.Word)}
		})...)
	} else {
		code = append(code,
			asm.Mov.Imm(asm.R1, 0), asm.StoreMem(asm.RFP, onDestination, asm.R1, asm.DWord),
			asm.StoreMem(asm.RFP, onDestination+8, asm.R1, asm.Half),
			asm.Mov.Imm(asm.R1, -1), asm.StoreMem(asm.RFP, onDestination+10, asm.R1, asm.Half),
			asm.LoadMem(asm.R1, asm.R6, ctxIP4, asm.Word), asm.StoreMem(asm.RFP, onDestination+12, asm.R1, asm.Word))
	}
	code = append(code,
		asm.LoadMem(asm.R1, asm.R6, ctxPort, asm.Word), asm.StoreMem(asm.RFP, onDestination+16, asm.R1, asm.Word),
		asm.Mov.Reg(asm.R1, asm.R6), asm.FnGetSocketCookie.Call(), asm.StoreMem(asm.RFP, onCookie, asm.R0, asm.DWord),
	)
	code = append(code, note(dialing, onDestination)...)
	code = append(code, find(onDestination)...)
	code = append(code,
		asm.JEq.Imm(asm.R0, 0, "pass"),
		asm.Mov.Reg(asm.R8, asm.R0),
		asm.FnKtimeGetBootNs.Call(), asm.Mov.Reg(asm.R7, asm.R0),
		asm.LoadMem(asm.R1, asm.R8, atExpires, asm.DWord), asm.JGE.Reg(asm.R7, asm.R1, "pass"),
		asm.LoadMem(asm.R9, asm.R8, atCount, asm.Word), asm.JEq.Imm(asm.R9, 0, "pass"),
		asm.FnGetPrandomU32.Call(), asm.StoreMem(asm.RFP, onRandom, asm.R0, asm.DWord),
		asm.Mov.Imm(asm.R1, 0), asm.StoreMem(asm.RFP, onTried, asm.R1, asm.DWord),
		// next: try all replacements, beginning with a random one. The index is a remainder of a
		// number that is unknown to the verifier, which therefore finds the same bounds in each
		// iteration. Otherwise the verifier requires CAP_PERFMON.
		asm.LoadMem(asm.R2, asm.RFP, onTried, asm.DWord).WithSymbol("next"),
		asm.JGE.Imm(asm.R2, maxReplacements, "none"), asm.JGE.Reg(asm.R2, asm.R9, "none"),
		asm.LoadMem(asm.R1, asm.RFP, onRandom, asm.DWord), asm.Add.Reg(asm.R1, asm.R2),
		asm.Add.Imm(asm.R2, 1), asm.StoreMem(asm.RFP, onTried, asm.R2, asm.DWord),
		asm.Mod.Reg32(asm.R1, asm.R9),
		asm.JGE.Imm(asm.R1, maxReplacements, "none"),
		asm.Mul.Imm(asm.R1, addressLen),
		asm.Mov.Reg(asm.R2, asm.R8), asm.Add.Reg(asm.R2, asm.R1),
	)
	code = append(code, words(addressLen/4, func(at int16) asm.Instructions {
		return asm.Instructions{asm.LoadMem(asm.R1, asm.R2, atReplacements+at, asm.Word),
			asm.StoreMem(asm.RFP, onReplacement+at, asm.R1, asm.Word)}
	})...)
	code = append(code, note(dialing, onReplacement)...)
	code = append(code, find(onReplacement)...)
	code = append(code,
		asm.JEq.Imm(asm.R0, 0, "take"),
		asm.LoadMem(asm.R1, asm.R0, atExpires, asm.DWord), asm.JLT.Reg(asm.R7, asm.R1, "next"),
	)
	take := note(redirected, onDestination)
	take[0] = take[0].WithSymbol("take")
	if six {
		take = append(take, words(4, func(at int16) asm.Instructions {
			return asm.Instructions{asm.LoadMem(asm.R1, asm.RFP, onReplacement+at, asm.Word),
				asm.StoreMem(asm.R6, ctxIP6+at, asm.R1, asm.Word)}
		})...)
	} else {
		take = append(take, asm.LoadMem(asm.R1, asm.RFP, onReplacement+12, asm.Word),
			asm.StoreMem(asm.R6, ctxIP4, asm.R1, asm.Word))
	}
	code = append(code, take...)
	code = append(code,
		asm.LoadMem(asm.R1, asm.RFP, onReplacement+16, asm.Word), asm.StoreMem(asm.R6, ctxPort, asm.R1, asm.Word),
		asm.Ja.Label("pass"),
	)
	none := note(dialing, onDestination)
	none[0] = none[0].WithSymbol("none")
	return append(append(code, none...), asm.Mov.Imm(asm.R0, 1).WithSymbol("pass"), asm.Return())
}

// forget returns a program that deletes the notes of a socket, unless the instructions in before
// jump to pass.
func forget(from []int, before ...asm.Instruction) asm.Instructions {
	code := append(asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1)}, before...)
	code = append(code,
		asm.Mov.Reg(asm.R1, asm.R6), asm.FnGetSocketCookie.Call(), asm.StoreMem(asm.RFP, onCookie, asm.R0, asm.DWord))
	for _, notes := range from {
		code = append(code, asm.LoadMapPtr(asm.R1, notes),
			asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, onCookie), asm.FnMapDeleteElem.Call())
	}
	return append(code, asm.Mov.Imm(asm.R0, 1).WithSymbol("pass"), asm.Return())
}

// needs has the requirements of each program, for the error of an agent that cannot load it.
var needs = map[string]string{
	"ld_connect4": "cgroup/connect4 with bpf_ktime_get_boot_ns: Linux 5.8, CONFIG_CGROUP_BPF, CAP_BPF, CAP_NET_ADMIN",
	"ld_connect6": "cgroup/connect6 with bpf_ktime_get_boot_ns: Linux 5.8, CONFIG_CGROUP_BPF, CONFIG_IPV6",
	"ld_dialed":   "sockops: Linux 4.14, CONFIG_CGROUP_BPF",
	"ld_released": "cgroup/sock_release: Linux 5.9, CONFIG_CGROUP_BPF",
}

func loadPrograms(maps map[string]*ebpf.Map) ([]*ebpf.Program, error) {
	var all []*ebpf.Program
	for _, spec := range programSpecs(maps) {
		p, err := ebpf.NewProgram(spec)
		if err != nil {
			return nil, fmt.Errorf("load the program %s (it needs %s): %w", spec.Name, needs[spec.Name], err)
		}
		all = append(all, p)
	}
	return all, nil
}
