package kernel

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// queryEffective requests the programs of a cgroup and of its ancestors (BPF_F_QUERY_EFFECTIVE).
const queryEffective = 1

// attached has the programs in the cgroup of one pod, and their maps. Maps and links are pinned, so
// they continue without an agent.
type attached struct {
	cgroup, pins string
	maps         map[string]*ebpf.Map
	programs     []*ebpf.Program
	ids          []ebpf.ProgramID
	links        []link.Link
	// generation changes whenever the programs are attached. times counts that in this agent.
	generation string
	times      int
	// cgroups are the IDs of the pod's cgroups, including those that have ended.
	cgroups map[uint64]bool
}

// mayUse returns an error that names the missing capabilities. Nil: none is missing.
func mayUse() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	if err := unix.Capget(&header, &sets[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	has := func(c int) bool { return sets[c/32].Effective&(1<<(c%32)) != 0 }
	var missing []string
	if !has(unix.CAP_BPF) && !has(unix.CAP_SYS_ADMIN) {
		missing = append(missing, "CAP_BPF")
	}
	if !has(unix.CAP_NET_ADMIN) {
		missing = append(missing, "CAP_NET_ADMIN")
	}
	if missing != nil {
		return fmt.Errorf("missing: %s", strings.Join(missing, ", "))
	}
	return nil
}

// findPod returns the cgroup (v2) of a pod: pod<uid> where the kubelet's driver is cgroupfs,
// ...-pod<uid>.slice with underscores where it is systemd.
func findPod(root, uid string) (found string, err error) {
	fsType := unix.Statfs_t{}
	if err := unix.Statfs(root, &fsType); err != nil {
		return "", fmt.Errorf("cgroups %q: %w", root, err)
	}
	if fsType.Type != unix.CGROUP2_SUPER_MAGIC {
		return "", fmt.Errorf("cgroups %q: not a cgroup2 mount (beside cgroup v1 it is the folder unified)", root)
	}
	names := []string{"pod" + uid, "pod" + strings.ReplaceAll(uid, "-", "_") + ".slice"}
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist): // it has ended meanwhile
			return nil
		case err != nil:
			return err
		case !d.IsDir():
			return nil
		case d.Name() == names[0] || d.Name() == names[1] || strings.HasSuffix(d.Name(), "-"+names[1]):
			found = path
			return fs.SkipAll
		}
		return nil
	})
	if err == nil && found == "" {
		err = fmt.Errorf("no cgroup of the pod %s below %s: the node's own cgroup mount is needed", uid, root)
	}
	return found, err
}

// attach attaches the programs to a pod's cgroup. They replace those of an earlier agent.
func attach(c Config, maxExclusions uint32) (*attached, error) {
	if err := mayUse(); err != nil {
		return nil, err
	}
	cgroup, err := findPod(c.Cgroups, c.PodUID)
	if err != nil {
		return nil, err
	}
	a := &attached{cgroup: cgroup, pins: filepath.Join(c.Pins, c.PodUID), cgroups: map[uint64]bool{},
		maps: map[string]*ebpf.Map{}}
	sweepPins(c.Pins, a.pins)
	_, none := os.Stat(filepath.Join(a.pins, linkName(0)))
	fail := func(err error) (*attached, error) {
		a.close()
		if errors.Is(none, fs.ErrNotExist) { // sweepPins needs a link, and an earlier agent has left none
			_ = os.RemoveAll(a.pins)
		}
		return nil, err
	}
	err = os.MkdirAll(a.pins, 0o700)
	for name, spec := range mapSpecs(maxExclusions) {
		if err != nil {
			break
		}
		var m *ebpf.Map
		m, err = ebpf.NewMapWithOptions(spec, ebpf.MapOptions{PinPath: a.pins})
		if errors.Is(err, ebpf.ErrMapIncompatible) { // of another version
			_ = os.Remove(filepath.Join(a.pins, name))
			m, err = ebpf.NewMapWithOptions(spec, ebpf.MapOptions{PinPath: a.pins})
		}
		a.maps[name] = m
	}
	if err != nil {
		return fail(fmt.Errorf("make maps in %s (it needs bpffs, CONFIG_BPF_SYSCALL): %w", a.pins, err))
	}
	if a.programs, err = loadPrograms(a.maps); err == nil {
		err = a.link()
	}
	if err == nil {
		err = a.verify()
	}
	if err != nil {
		return fail(err)
	}
	return a, nil
}

// sweepPins deletes the pinned maps and links of pods that have ended.
func sweepPins(dir, own string) {
	pods, _ := os.ReadDir(dir)
	for _, pod := range pods {
		path := filepath.Join(dir, pod.Name())
		l, err := link.LoadPinnedLink(filepath.Join(path, linkName(0)), nil)
		if path == own || err != nil {
			continue
		}
		info, err := l.Info()
		_ = l.Close()
		if err == nil && info.Cgroup() != nil && info.Cgroup().CgroupId == 0 {
			_ = os.RemoveAll(path)
		}
	}
}

// linkName returns the file name of a program's pinned link. It must be the same in all versions.
func linkName(n int) string { return attachTypes[n].String() }

// link attaches the programs. It updates an existing pinned link, so that the pod is never without
// a program.
func (a *attached) link() error {
	a.closeLinks()
	a.ids = nil
	id := ""
	for i, p := range a.programs {
		path := filepath.Join(a.pins, linkName(i))
		l, err := link.LoadPinnedLink(path, nil)
		if err == nil {
			if err = l.Update(p); err != nil {
				_ = l.Close()
			}
		}
		if err != nil {
			_ = os.Remove(path)
			l, err = link.AttachCgroup(link.CgroupOptions{Path: a.cgroup, Attach: attachTypes[i], Program: p})
			if err == nil {
				if err = l.Pin(path); err != nil {
					_ = l.Close()
				}
			}
		}
		if err != nil {
			return fmt.Errorf("attach %s to %s (it needs CAP_NET_ADMIN, CONFIG_CGROUP_BPF, bpffs): %w", p, a.cgroup,
				err)
		}
		a.links = append(a.links, l)
		info, err := p.Info()
		if err != nil {
			return err
		}
		linked, err := l.Info()
		if err != nil {
			return err
		}
		number, _ := info.ID()
		a.ids = append(a.ids, number)
		id += fmt.Sprintf("%d.%d ", number, linked.ID)
	}
	a.times++
	a.generation = fmt.Sprintf("%s%d", id, a.times)
	return nil
}

// verify returns an error unless each program of a is attached to each cgroup of the pod.
func (a *attached) verify() error {
	return filepath.WalkDir(a.cgroup, func(path string, d fs.DirEntry, err error) error {
		if path != a.cgroup && errors.Is(err, fs.ErrNotExist) {
			return nil // it has ended meanwhile
		}
		if err != nil || !d.IsDir() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			if path != a.cgroup && errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return err
		}
		defer f.Close()
		for i, p := range a.programs {
			result, err := link.QueryPrograms(link.QueryOptions{Target: int(f.Fd()), Attach: attachTypes[i],
				QueryFlags: queryEffective})
			if (errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT)) && path != a.cgroup {
				return nil // it has ended meanwhile
			}
			if err != nil {
				return fmt.Errorf("programs of %s: %w", path, err)
			}
			if !slices.ContainsFunc(result.Programs, func(on link.AttachedProgram) bool { return on.ID == a.ids[i] }) {
				return fmt.Errorf("%w: %s in %s", errDetached, p, path)
			}
		}
		info, err := f.Stat()
		if err != nil {
			return err
		}
		a.cgroups[info.Sys().(*syscall.Stat_t).Ino] = true //nolint:forcetypeassert // it is Linux
		return nil
	})
}

var errDetached = errors.New("a program was detached")

// ensure attaches programs again that were detached. That changes the generation.
func (a *attached) ensure() error {
	err := a.verify()
	if errors.Is(err, errDetached) {
		if err = a.link(); err == nil {
			err = a.verify()
		}
	}
	return err
}

// populated reports whether a process other than the agent is in the pod's cgroup.
func (a *attached) populated() bool {
	found := false
	own := fmt.Sprint(os.Getpid())
	err := filepath.WalkDir(a.cgroup, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || err == nil && !d.IsDir() {
			return nil
		}
		text, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		for _, pid := range strings.Fields(string(text)) {
			found = found || pid != own
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
	return found || err != nil
}

func (a *attached) closeLinks() {
	for _, l := range a.links {
		_ = l.Close()
	}
	a.links = nil
}

// close closes this agent's file descriptors. Pinned maps and links continue.
func (a *attached) close() {
	a.closeLinks()
	for _, p := range a.programs {
		_ = p.Close()
	}
	for _, m := range a.maps {
		_ = m.Close()
	}
}
