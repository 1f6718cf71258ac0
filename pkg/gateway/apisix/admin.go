package apisix

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/lameduck-io/lameduck/internal/signal"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	// mark is the label of an upstream that agents direct. The plug-in reports only these.
	mark = "lameduck"
	// nowhere is an address that refuses connections. An upstream without targets has this node,
	// because APISIX cannot merge into an empty set: it would store a null as the weight of a node.
	nowhere = "127.0.0.1:1"
	// forget follows WantAbsent once nothing runs on the target: its label goes, too.
	forget = health.WantAbsent + 1
	// veto is how long other agents do not route to a target that one agent has removed. A
	// coordinator may take this long to send them the exclusion.
	veto = 30 * time.Second
	// maxAnswer bounds an answer, in bytes.
	maxAnswer = 64 << 20
)

// errConflict is the only refusal of the Admin API after which a write is retried.
var errConflict = errors.New("value changed before overwritten")

// upstream is an upstream object as stored in etcd. Processes may still route by an earlier
// version.
type upstream struct {
	version int64
	// nodes has the weight of every node. A node of weight 0 still gets retries.
	nodes  map[string]int
	labels map[health.Target]label
	// refused is why a removal of its targets cannot be proved. Nil: it can.
	refused error
}

// label is an agent's note about a target: "routed", or "removed/UNTIL/AGENT". Until UNTIL, in Unix
// milliseconds, only AGENT may route to the target again.
type label string

func (l label) parse() (until time.Time, agent string) {
	words := strings.SplitN(string(l)+"//", "/", 3)
	millis, _ := strconv.ParseInt(words[1], 10, 64) // another text: the veto has ended
	return time.UnixMilli(millis), strings.Trim(words[2], "/")
}

// shared reports whether another pod is routed at the address of t.
func (u *upstream) shared(t health.Target) bool {
	for other, l := range u.labels {
		if l == "routed" && other != t && other.Addr == t.Addr {
			return true
		}
	}
	return false
}

// routes reports whether t is to get requests.
func (u *upstream) routes(t health.Target) bool {
	_, listed := u.nodes[t.Addr.String()]
	return listed && (u.labels[t] == "routed" || !u.shared(t))
}

// call sends one request and decodes the answer. Every status but a success is an error.
func (g *Gateway) call(ctx context.Context, method, url string, body, into any) (status int, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("%s %s: %w", method, url, err)
		}
	}()
	var sent []byte // none with a GET
	if body != nil {
		sent, err = json.Marshal(body)
	}
	r, e := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(sent))
	if err = errors.Join(err, e); err != nil {
		return 0, err
	}
	if strings.HasPrefix(url, g.admin) && g.cfg.AdminKeyFile != "" {
		key, err := os.ReadFile(g.cfg.AdminKeyFile)
		if err != nil {
			return 0, err
		}
		r.Header.Set("X-API-KEY", strings.TrimSpace(string(key)))
	}
	answer, err := g.client.Do(r)
	if err != nil {
		return 0, err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
	if err == nil && answer.StatusCode/100 == 2 {
		return answer.StatusCode, json.Unmarshal(text, into)
	}
	var refusal struct {
		Text string `json:"error_msg"`
	}
	if json.Unmarshal(text, &refusal) == nil && refusal.Text == errConflict.Error() &&
		answer.StatusCode == http.StatusServiceUnavailable {
		return answer.StatusCode, errConflict
	}
	return answer.StatusCode, errors.Join(err, fmt.Errorf("%s: %.200s", answer.Status, text))
}

func (g *Gateway) url(pool health.Pool) string { return g.admin + "upstreams/" + string(pool) }

// store writes to one upstream object. Without an answer, or with one of a server that failed, the
// write may still be carried out.
func (g *Gateway) store(ctx context.Context, method string, pool health.Pool, body any, ops []health.Op) error {
	status, err := g.call(ctx, method, g.url(pool), body, new(any))
	if status/100 == 2 || status/100 == 4 || errors.Is(err, errConflict) || errors.Is(err, syscall.ECONNREFUSED) {
		return err
	}
	return &gateway.Unanswered{Ops: ops, For: lateFor, Err: err}
}

// upstream reads one upstream object. It creates the object if there is none, because routes can
// refer only to an existing one.
func (g *Gateway) upstream(ctx context.Context, pool health.Pool) (*upstream, error) {
	if g.services[pool] == "" {
		return nil, fmt.Errorf("no upstream %q is configured", pool)
	}
	var answer struct {
		Value struct {
			Type    string
			Nodes   json.RawMessage
			Labels  map[string]string
			Checks  any
			Service string `json:"service_name"`
		}
		ModifiedIndex int64
	}
	url := g.url(pool)
	status, err := g.call(ctx, http.MethodGet, url, nil, &answer)
	if status == http.StatusNotFound {
		made := map[string]any{"type": "roundrobin", "nodes": map[string]int{nowhere: 1},
			"labels": map[string]string{mark: "agent"}}
		err = g.store(ctx, http.MethodPut, pool, made, nil)
		if late := (*gateway.Unanswered)(nil); errors.As(err, &late) {
			g.creating[pool] = time.Now().Add(lateFor)
		}
		if err == nil {
			_, err = g.call(ctx, http.MethodGet, url, nil, &answer)
		}
	}
	if err != nil {
		return nil, err
	}
	value, nodes, why := answer.Value, nodesOf(answer.Value.Nodes), ""
	switch {
	case value.Labels[mark] == "":
		why = "has no label " + mark + ": no agent has made it"
	case bytes.HasPrefix(value.Nodes, []byte("[")) && len(nodes) > 0: // [] is how APISIX stores an empty set
		return nil, fmt.Errorf("upstream %s has its nodes as a list, into which changes cannot be merged", pool)
	case value.Type == "ewma":
		why = "balances by ewma"
	case value.Checks != nil:
		why = "has checks, whose records pass from one pod to the next at its address"
	case value.Service != "":
		why = "has a service_name of discovery"
	}
	u := &upstream{version: answer.ModifiedIndex, nodes: nodes, labels: map[health.Target]label{}}
	if why != "" {
		u.refused = fmt.Errorf("upstream %s %s: not covered", pool, why)
	}
	for key, text := range value.Labels {
		if t, ok := targetOf(key); ok {
			u.labels[t] = label(text)
		}
	}
	return u, nil
}

// targetOf parses the key of a label.
func targetOf(key string) (t health.Target, ok bool) {
	address, uid, _ := strings.Cut(key, "@")
	t.UID = health.UID(uid)
	return t, t.Addr.UnmarshalText([]byte(address)) == nil
}

// ops are what delta changes, also of targets that are not among those wanted.
func (u *upstream) ops(pool health.Pool, delta map[string]map[string]any) (ops []health.Op) {
	targets := map[health.Target]bool{}
	for t := range u.labels {
		targets[t] = true
	}
	for key := range delta["labels"] {
		if t, ok := targetOf(key); ok {
			targets[t] = true
		}
	}
	for t := range targets {
		weight, changes := delta["nodes"][t.Addr.String()]
		op := health.Op{Key: health.Key{Pool: pool, Target: t}, Want: health.WantRemoved}
		if weight != nil || delta["labels"][t.String()] == label("routed") {
			op.Want = health.WantRouted
		}
		if changes || op.Want == health.WantRouted {
			ops = append(ops, op)
		}
	}
	return ops
}

// nodesOf returns the weights of a node set in either form.
func nodesOf(text []byte) map[string]int {
	all := map[string]int{}
	if json.Unmarshal(text, &all) == nil {
		return all
	}
	var list []struct {
		Host         string
		Port, Weight int
	}
	_ = json.Unmarshal(text, &list) // neither form: no nodes
	for _, n := range list {
		all[address(n.Host, n.Port)] = n.Weight
	}
	return all
}

func address(host string, port int) string {
	return net.JoinHostPort(strings.Trim(host, "[]"), strconv.Itoa(port))
}

// write changes one upstream object as its targets want, and begins again if another writer was
// faster. After a change it reads the object once more, because APISIX merges changes that two
// agents make at once. vetoed has the targets that have to stay as they are, each with the reason.
func (g *Gateway) write(ctx context.Context, pool health.Pool, wants map[health.Key]health.Want) (
	vetoed map[health.Key]error, err error) {
	for changed := false; ; {
		u, err := g.upstream(ctx, pool)
		if err != nil {
			return nil, err
		}
		delta, vetoed := g.delta(u, pool, wants)
		if len(delta) == 0 {
			return vetoed, nil
		}
		err = g.store(ctx, http.MethodPatch, pool, delta, u.ops(pool, delta))
		switch {
		case errors.Is(err, errConflict) && signal.Sleep(ctx, pause):
		case err != nil || changed:
			return vetoed, errors.Join(err, ctx.Err())
		default:
			changed = true
		}
	}
}

// delta returns the changes to merge into u, and the vetoed targets. A null removes a node or a
// label. A target without use also loses its label. The last nodes stay, or come back, if another
// agent has removed others, which this one may still believe to be routed.
func (g *Gateway) delta(u *upstream, pool health.Pool, wants map[health.Key]health.Want) (
	delta map[string]map[string]any, vetoed map[health.Key]error) {
	nodes, labels, vetoed := map[string]any{}, map[string]any{}, map[health.Key]error{}
	set, after, now := maps.Clone(u.nodes), maps.Clone(u.labels), time.Now()
	for k, want := range wants {
		if k.Pool != pool {
			continue
		}
		l, known := u.labels[k.Target]
		until, agent := l.parse()
		switch {
		case want == health.WantRouted && known && l != "routed" && agent != g.name && now.Before(until):
			vetoed[k] = &gateway.Refused{Op: health.Op{Key: k, Want: want},
				Err: fmt.Errorf("%s has removed it: left so until %s", agent, until.UTC().Format(time.TimeOnly))}
			continue
		case want == health.WantRouted:
			after[k.Target] = "routed"
		case want == forget:
			delete(after, k.Target)
		case l == "routed":
			after[k.Target] = label(fmt.Sprintf("removed/%d/%s", now.Add(veto).UnixMilli(), g.name))
		}
		if is, stays := after[k.Target]; stays && is != l {
			labels[k.Target.String()] = is
		} else if !stays && known {
			labels[k.Target.String()] = nil
		}
		delete(set, k.Target.Addr.String())
	}
	delete(set, nowhere)
	for t, l := range after {
		if l == "routed" {
			set[t.Addr.String()] = 1
		}
	}
	if len(set) == 0 {
		if kept := g.keep(u, pool, wants); len(kept) > 0 {
			rest := maps.Clone(wants)
			for k := range kept {
				rest[k] = health.WantRouted
			}
			delta, vetoed = g.delta(u, pool, rest)
			maps.Copy(vetoed, kept)
			return delta, vetoed
		}
		set[nowhere] = 1
	}
	for node := range set {
		if u.nodes[node] == 0 {
			nodes[node] = 1
		}
	}
	for node := range u.nodes {
		if _, stays := set[node]; !stays {
			nodes[node] = nil
		}
	}
	delta = map[string]map[string]any{"nodes": nodes, "labels": labels}
	maps.DeleteFunc(delta, func(_ string, v map[string]any) bool { return len(v) == 0 }) // it would replace all
	return delta, vetoed
}

// keep returns the targets without which u would have none, each with the reason: those that this
// agent takes out, although they are not to be absent, if another agent has taken out others.
func (g *Gateway) keep(u *upstream, pool health.Pool, wants map[health.Key]health.Want) map[health.Key]error {
	other, kept := "", map[health.Key]error{}
	for _, l := range u.labels {
		if _, agent := l.parse(); agent != g.name {
			other = max(other, agent)
		}
	}
	for k, want := range wants {
		_, agent := u.labels[k.Target].parse()
		mine := u.routes(k.Target) || agent == g.name
		if k.Pool == pool && want == health.WantRemoved && mine && other != "" {
			kept[k] = fmt.Errorf("the last one: %s has removed the others", other)
		}
	}
	return kept
}
