//go:build e2e && long

package nodes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/cluster/machine"
)

// fault is an entry of a schedule: from at on, for as long as it lasts, one of the kinds is done to
// one of its targets. Only kinds that send signals look at signal.
type fault struct {
	at, lasts    time.Duration
	kind, target int
	signal       syscall.Signal
}

// kind is a kind of fault.
type kind struct {
	name    string
	targets int
	// group names faults of which one at a time is active. Empty: those of one kind and target.
	group string
	// signals reports whether begin sends the fault's signal.
	signals bool
	// loses are the ways on which requests may be lost while it is active, since no deletion waits
	// for a gateway that is dead, and no gateway reaches a node that is cut off. All other failures
	// of requests need another explanation, or are violations.
	loses      func(target int) []string
	begin, end func(context.Context, fault) error
	// over returns nil once its consequences are over. Nil: they are when it ends.
	over func(context.Context, fault) error
}

var signals = []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP, syscall.SIGTERM}

// draw returns the faults of a seed that end within a time. It depends on nothing else, and a
// longer schedule begins as a shorter one does.
func draw(seed uint64, kinds []kind, length time.Duration) (all []fault) {
	const rest = 20 * time.Second // between faults of one group
	random := rand.New(rand.NewPCG(seed, 0))
	seconds := func(least, most int) time.Duration {
		return time.Duration(least+random.IntN(most-least+1)) * time.Second
	}
	busy := map[string]time.Duration{}
	for at := seconds(5, 10); at < length; at += seconds(4, 22) {
		f := fault{at: at, lasts: seconds(2, 20), kind: random.IntN(len(kinds)), signal: signals[random.IntN(3)]}
		k := kinds[f.kind]
		f.target = random.IntN(k.targets)
		group := cmp.Or(k.group, fmt.Sprint(f.kind, f.target))
		if end := f.at + f.lasts; busy[group] <= at && end <= length {
			busy[group] = end + rest
			all = append(all, f)
		}
	}
	return all
}

// name returns what a fault does, without its target.
func (c *chaos) name(f fault) string {
	if k := c.kinds[f.kind]; k.signals {
		return f.signal.String() + ": " + k.name
	}
	return c.kinds[f.kind].name
}

func (c *chaos) describe(f fault) string {
	return fmt.Sprintf("%.0f s: %s %d, for %s", f.at.Seconds(), c.name(f), f.target, f.lasts)
}

var (
	byKubeProxy = ways[:2]
	directed    = ways[2:]
)

// fullDisk is the name of the fault that fills the disk of the journal and of the servers file.
const fullDisk = "fill the journal's disk"

// controlPlane is the group of faults that take the API server, or its store, away.
const controlPlane = "control plane"

// active reports whether a fault of that name has not ended.
func (c *chaos) active(name string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.ContainsFunc(c.windows, func(w *window) bool { return w.why == name && w.to.IsZero() })
}

// loses returns the same ways for each target.
func loses(these ...string) func(int) []string { return func(int) []string { return these } }

// allKinds returns what can be done. A change of their order or number changes every schedule.
func (c *chaos) allKinds() []kind {
	nodes := c.Set.Machines
	onNode := func(command string) func(int) ([]*machine.Machine, string) {
		return func(target int) ([]*machine.Machine, string) { return nodes[target : target+1], command }
	}
	anywhere := func(command string) func(int) ([]*machine.Machine, string) {
		return func(int) ([]*machine.Machine, string) { return nodes, command }
	}
	return []kind{
		process(kind{name: "a coordinator", targets: 2, group: "coordinators"}, "",
			func(target int) ([]*machine.Machine, string) {
				return nodes, fmt.Sprintf("^/webhook .*--ordinal=%d", target)
			}),
		// While no coordinator is ready, windows of chaos.look say so.
		process(kind{name: "all coordinators", targets: 1, group: "coordinators"}, "", anywhere("^/webhook ")),
		process(kind{name: "HAProxy", targets: 1, loses: loses(directed...), over: func(context.Context, fault) error {
			_, err := inMaintenance(c.gateway)
			return err
		}}, "", anywhere("^([^ ]*/)?haproxy ")),
		process(kind{name: "the gateway's agent", targets: 1}, "", anywhere("^/agent --config=/config")),
		process(kind{name: "the agent of node", targets: len(nodes), loses: loses(byKubeProxy...),
			over: func(_ context.Context, f fault) error {
				_, err := get(fmt.Sprintf("http://%s:9101/readyz", nodes[f.target].Address))
				return err
			}}, "", onNode(nodeAgent)),
		process(kind{name: "kube-proxy", targets: len(nodes)}, "kube-proxy", onNode("^[^ ]*/kube-proxy ")),
		process(kind{name: "kubelet", targets: len(nodes)}, "kubelet", onNode("^[^ ]*/kubelet ")),
		{
			name: "cut off node", targets: len(nodes), group: "cut", loses: loses(ways...),
			begin: func(_ context.Context, f fault) error { return nodes[f.target].Cut() },
			end:   func(_ context.Context, f fault) error { return nodes[f.target].Heal() },
			over:  func(ctx context.Context, f fault) error { return c.nodeReady(ctx, nodes[f.target].Name) },
		},
		{
			name: fullDisk, targets: 1,
			begin: func(ctx context.Context, _ fault) error {
				return c.onGateway(ctx, "dd if=/dev/zero of=$d/full bs=64k; test -s $d/full")
			},
			end: func(ctx context.Context, _ fault) error { return c.onGateway(ctx, "rm $d/full") },
		},
		{
			name: "API server", targets: 1, group: controlPlane,
			begin: func(context.Context, fault) error { c.KillAPIServer(); return nil },
			end:   func(ctx context.Context, _ fault) error { return c.RestartAPIServer(ctx) },
		},
		{
			name: "etcd", targets: 1, group: controlPlane,
			begin: func(context.Context, fault) error { c.KillEtcd(); return nil },
			end:   func(ctx context.Context, _ fault) error { return c.RestartEtcd(ctx) },
		},
		{
			name: "reload HAProxy", targets: 1,
			begin: func(ctx context.Context, _ fault) error {
				// Its master is the first process of the container.
				_, err := nodes[0].Run(ctx, "bash", "-c", `
					for p in /proc/[0-9]*; do
						mapfile -d '' -t args < $p/cmdline
						[[ "${args[*]}" =~ ^([^ ]*/)?haproxy\  ]] && grep -qP '^NSpid:.*\s1$' $p/status &&
						kill -USR2 ${p#/proc/} && exit
					done 2> /dev/null; exit 1`)
				if err == nil && c.active(fullDisk) {
					// Until the agent has read it, it sends to the servers of a former file.
					c.open(window{why: "reload with a full disk", ways: directed, from: time.Now().Add(-time.Second),
						to: time.Now().Add(margin)})
				}
				return err
			},
			end: func(context.Context, fault) error { return nil },
		},
		{
			name: "rotate certificates, gently (0) or at once (1)", targets: 2, group: "certificates",
			loses: func(target int) []string { return ways[:target*len(ways)] },
			begin: func(ctx context.Context, f fault) error {
				args := [][]string{
					{"annotate", "--overwrite", fmt.Sprintf("lameduck.io/rotate=%d", time.Now().Unix())},
					{"patch", "--type=merge", "--patch", `{"data": null}`},
				}[f.target]
				_, err := c.Kubectl(ctx, append([]string{args[0], "-n", system, "secret", "lameduck-certificates"},
					args[1:]...)...)
				return err
			},
			end:  func(context.Context, fault) error { return nil },
			over: func(ctx context.Context, _ fault) error { return c.connected(ctx) },
		},
		c.rights("lameduck-agent-gateway", "lameduck-node-agent", "lameduck-node", "lameduck-webhook"),
	}
}

// process completes a kind that sends signals to the processes of find. The kubelet starts those of
// pods again. A program of the machine itself is named by again.
func process(k kind, again string, find func(target int) ([]*machine.Machine, string)) kind {
	send := func(ctx context.Context, target int, s syscall.Signal) error {
		all, command := find(target)
		sum, errs := 0, []error(nil)
		for _, m := range all {
			n, err := signal(ctx, m, command, s)
			sum, errs = sum+n, append(errs, err)
		}
		if sum == 0 && s != syscall.SIGCONT {
			errs = append(errs, fmt.Errorf("no process is %s", command))
		}
		return errors.Join(errs...)
	}
	k.signals = true
	k.begin = func(ctx context.Context, f fault) error { return send(ctx, f.target, f.signal) }
	k.end = func(ctx context.Context, f fault) error {
		all, _ := find(f.target)
		switch {
		case f.signal == syscall.SIGSTOP:
			return send(ctx, f.target, syscall.SIGCONT)
		case again != "":
			return all[0].Restart(again)
		}
		return nil
	}
	return k
}

// rights returns the kind that takes bindings of a ClusterRole away and gives them back.
func (c *chaos) rights(names ...string) kind {
	bindings := c.Kube.RbacV1().ClusterRoleBindings()
	taken := make([]*rbacv1.ClusterRoleBinding, len(names))
	return kind{
		name: "take rights away", targets: len(names),
		loses: func(target int) []string { return [][]string{directed, byKubeProxy, byKubeProxy, ways}[target] },
		begin: func(ctx context.Context, f fault) error {
			b, err := bindings.Get(ctx, names[f.target], metav1.GetOptions{})
			if err != nil {
				return err
			}
			taken[f.target] = &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: b.Name, Labels: b.Labels},
				RoleRef: b.RoleRef, Subjects: b.Subjects}
			return bindings.Delete(ctx, b.Name, metav1.DeleteOptions{})
		},
		end: func(ctx context.Context, f fault) error {
			if taken[f.target] == nil {
				return nil // the API server was away
			}
			_, err := bindings.Create(ctx, taken[f.target], metav1.CreateOptions{})
			if apierrors.IsAlreadyExists(err) {
				return nil
			}
			return err
		},
		over: func(ctx context.Context, _ fault) error { return c.connected(ctx) },
	}
}

// onGateway runs a script on the gateway's node. $d is the folder that HAProxy and its agent share.
func (c *chaos) onGateway(ctx context.Context, script string) error {
	_, err := c.Set.Machines[0].Run(ctx, "bash", "-c",
		"for d in /run/node/kubelet/pods/*/volumes/kubernetes.io~empty-dir/shared; do "+script+"; done")
	return err
}

// nodeReady returns nil if a node is ready or, without a name, if all are, and none is cordoned.
func (c *chaos) nodeReady(ctx context.Context, name string) error {
	all, err := c.Kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, n := range all.Items {
		if name != "" && n.Name != name {
			continue
		}
		if !slices.ContainsFunc(n.Status.Conditions, func(n corev1.NodeCondition) bool {
			return n.Type == corev1.NodeReady && n.Status == corev1.ConditionTrue
		}) || name == "" && n.Spec.Unschedulable {
			return fmt.Errorf("node %s is not ready, or cordoned", n.Name)
		}
	}
	return nil
}

// A seed is one schedule, and a longer one begins as a shorter one does.
func TestSchedule(t *testing.T) {
	kinds := []kind{{targets: 2}, {targets: 3}, {targets: 1, group: "one"}, {targets: 2, group: "one"}}
	short, long, other := draw(7, kinds, 5*time.Minute), draw(7, kinds, 10*time.Minute), draw(8, kinds, 5*time.Minute)
	if len(short) < 5 || len(long) <= len(short) || !slices.Equal(short[:len(short)-2], long[:len(short)-2]) {
		t.Errorf("5 min: %v; 10 min: %v", short, long)
	}
	if slices.Equal(short, other) || !slices.Equal(short, draw(7, kinds, 5*time.Minute)) {
		t.Errorf("seed 7: %v; seed 8: %v", short, other)
	}
	var end time.Duration
	for _, f := range long {
		if kinds[f.kind].group == "one" {
			if f.at < end {
				t.Errorf("two at one time: %v", long)
			}
			end = f.at + f.lasts
		}
	}
}
