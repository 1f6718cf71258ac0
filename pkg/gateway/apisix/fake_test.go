package apisix

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/test/gatewaytest"
)

// fake is an APISIX with its etcd, as far as this package uses it: the Admin API, the control API
// with the plug-in, and a data port that sends real requests.
type fake struct {
	t      testing.TB
	server *httptest.Server
	proc   string // what /proc has of its processes
	client *http.Client

	mu        sync.Mutex
	index     int64
	objects   map[string]*object // by kind/id
	workers   []*worker          // that live
	pid, turn int
	frozen    chan struct{} // nil while it answers
	// conflicts is how many of the next patches find that another writer was faster.
	conflicts int
	// hold is called before the next write is carried out.
	hold func()
	// meanwhile is what another writer stores just before the next patch.
	meanwhile map[string]any
	// cut: nothing of etcd reaches the workers.
	cut bool
	// patches counts patches; health is what the health checker lists.
	patches int
	health  map[string]bool
	// apply is called in place of a patch's effect on a worker.
	apply func(w *worker, id string, now view)
	// observed says that the global rule does. discovered is what discovery.kubernetes has found of
	// a Service, in a dictionary that the workers share.
	observed   bool
	discovered map[string][]string
	cluttered  bool
	// unlisted is what workers say that they cannot list.
	unlisted string
}

type object struct {
	value   map[string]any
	version int64
}

type view struct {
	version  int64
	nodes    map[string]int
	services []string // that discovery resolves
}

type worker struct {
	pid          int
	old, stopped bool
	at           time.Time // of its last report, if it is old or stopped
	views        map[string]view
	reported     map[string]view
	picks        map[string]int // by id and version
	halves       int            // connections that have sent half a head
	mute         bool           // never reports
	// number is that of the last report, lists what it has, and running the requests by the last
	// report before they began, as the plug-in keeps them.
	number  int64
	lists   map[string]int64
	running map[int64]int
}

func newFake(t testing.TB, workers int) *fake {
	f := &fake{t: t, proc: t.TempDir(), objects: map[string]*object{}, index: 10, pid: 100,
		client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 8}}}
	f.restart(workers)
	f.server = httptest.NewServer(f)
	t.Cleanup(func() { f.thaw(); f.server.CloseClientConnections(); f.server.Close() })
	return f
}

func (f *fake) config() Config {
	return Config{Admin: f.server.URL, Control: f.server.URL,
		Upstreams: []Upstream{{Upstream: "web", Service: "shop/web"}}}
}

// open opens a gateway for the upstream web, and others.
func (f *fake) open(name string, others ...string) *Gateway {
	c := f.config()
	for _, other := range others {
		c.Upstreams = append(c.Upstreams, Upstream{Upstream: other, Service: "shop/" + other})
	}
	g := open(c, name)
	g.proc = f.proc
	return g
}

// restart ends all processes and starts a master with workers.
func (f *fake) restart(workers int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pid++
	f.workers = nil
	f.spawn(workers)
	f.write()
}

func (f *fake) spawn(workers int) {
	for range workers {
		f.pid++
		w := &worker{pid: f.pid, views: map[string]view{}, picks: map[string]int{},
			lists: map[string]int64{}, running: map[int64]int{}}
		f.workers = append(f.workers, w)
		f.follow(w)
	}
}

// reload starts workers beside those that live, which shut down.
func (f *fake) reload() {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, w := range f.workers {
		if !w.old {
			n++
			f.snapshot(w)
			w.old = true
		}
	}
	f.spawn(n)
	f.reap()
	f.write()
}

// snapshot makes the present state the last one that the worker reports.
func (f *fake) snapshot(w *worker) {
	if w.stopped {
		return
	}
	w.at, w.reported = time.Now(), maps.Clone(w.views)
	w.number++
	has := map[string]bool{}
	for id := range w.views {
		for node := range f.nodes(w, id) {
			has[node] = true
			w.lists[node] = 0
		}
	}
	oldest := slices.Min(append(slices.Collect(maps.Keys(w.running)), w.number))
	for node, out := range w.lists {
		if !has[node] && out == 0 {
			w.lists[node] = w.number
		} else if !has[node] && out <= oldest {
			delete(w.lists, node)
		}
	}
}

// nodes is what a worker would pick from for an object: one with upstreams in a plug-in's
// configuration has all of them.
func (f *fake) nodes(w *worker, id string) map[string]int {
	all := maps.Clone(w.views[id].nodes)
	for _, service := range w.views[id].services {
		for _, node := range f.discovered[service] {
			all[node] = 1
		}
	}
	return all
}

// stop is SIGSTOP for one worker.
func (f *fake) stop(w *worker) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.snapshot(w)
	w.stopped = true
}

// reap ends old workers that have nothing left to do. f.mu is held.
func (f *fake) reap() {
	f.workers = slices.DeleteFunc(f.workers, func(w *worker) bool {
		return w.old && !w.stopped && len(w.picks) == 0 && w.halves == 0
	})
}

// write makes the files of the processes. f.mu is held.
func (f *fake) write() {
	files := map[string]int{strconv.Itoa(f.master()): f.master()}
	for _, w := range f.workers {
		files[strconv.Itoa(w.pid)] = w.pid
	}
	list, err := os.ReadDir(f.proc)
	if err != nil {
		f.t.Error(err)
	}
	for _, e := range list {
		if files[e.Name()] == 0 {
			os.RemoveAll(filepath.Join(f.proc, e.Name()))
		}
	}
	for name, pid := range files {
		fields := strings.Repeat("0 ", 17)
		text := fmt.Sprintf("%d (nginx: (x)) S 1 %s%d 0 0", pid, fields, 7000+pid)
		if err := os.MkdirAll(filepath.Join(f.proc, name), 0o755); err != nil {
			f.t.Error(err)
		}
		if err := os.WriteFile(filepath.Join(f.proc, name, "stat"), []byte(text), 0o644); err != nil {
			f.t.Error(err)
		}
	}
}

func (f *fake) master() int { return 1 }

// kill ends all processes.
func (f *fake) kill() {
	f.mu.Lock()
	f.workers = nil
	f.mu.Unlock()
	os.RemoveAll(f.proc)
	f.server.CloseClientConnections()
	f.server.Close()
}

func (f *fake) freeze() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.frozen = make(chan struct{})
}

func (f *fake) thaw() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.frozen != nil {
		close(f.frozen)
		f.frozen = nil
	}
}

// follow brings a worker to what etcd has. f.mu is held.
func (f *fake) follow(w *worker) {
	if w.old || w.stopped || f.cut {
		return
	}
	for key, o := range f.objects {
		id := strings.TrimPrefix(key, "upstreams/")
		if w.views[id].version == o.version {
			continue
		}
		now := view{o.version, map[string]int{}, nil}
		for _, use := range walk(nil, key, o.value) {
			if use.service != "" {
				now.services = append(now.services, use.service)
			}
		}
		weigh(now.nodes, o.value)
		if f.apply != nil {
			f.apply(w, id, now)
			continue
		}
		w.views[id] = now
	}
}

// weigh adds the weights of all nodes in a value.
func weigh(nodes map[string]int, value any) {
	switch value := value.(type) {
	case []any:
		for _, v := range value {
			weigh(nodes, v)
		}
	case map[string]any:
		for key, v := range value {
			if key == "nodes" {
				raw, _ := json.Marshal(v) // it was JSON
				maps.Copy(nodes, nodesOf(raw))
			}
			weigh(nodes, v)
		}
	}
}

// set stores an object as an operator does.
func (f *fake) set(key, text string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	value := map[string]any{}
	if err := json.Unmarshal([]byte(text), &value); err != nil {
		f.t.Fatal(err)
	}
	f.store(key, value)
}

func (f *fake) store(key string, value map[string]any) {
	f.index++
	_, id, _ := strings.Cut(key, "/")
	value["id"] = id
	f.objects[key] = &object{value, f.index}
	for _, w := range f.workers {
		f.follow(w)
	}
}

// merge is core.table.merge of APISIX: an empty table is an array, and nulls are kept where there
// was nothing to merge into.
func merge(origin, extend map[string]any) {
	for k, v := range extend {
		table, ok := v.(map[string]any)
		if !ok {
			if v == nil {
				delete(origin, k)
			} else {
				origin[k] = v
			}
			continue
		}
		old, ok := origin[k].(map[string]any)
		if !ok || len(old) == 0 || len(table) == 0 {
			origin[k] = v
			continue
		}
		merge(old, table)
	}
}

func hasNull(v any) bool {
	table, ok := v.(map[string]any)
	for _, v := range table {
		ok = ok && v != nil && !hasNull(v)
	}
	return len(table) > 0 && !ok
}

// ServeHTTP implements http.Handler.
func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	frozen := f.frozen
	f.mu.Unlock()
	if frozen != nil {
		select {
		case <-frozen:
		case <-r.Context().Done():
			return
		}
	}
	path, admin := strings.CutPrefix(r.URL.Path, "/apisix/admin/")
	switch {
	case admin:
		f.admin(w, r, path)
	case r.URL.Path == "/v1/discovery/kubernetes/dump":
		f.dump(w)
	case r.URL.Path == "/v1/plugin/lameduck":
		answer(w, http.StatusOK, f.report())
	default:
		f.proxy(w, r)
	}
}

// clutter adds a Service that discovery.kubernetes has found and nothing can decode.
func (f *fake) clutter() {
	f.set("upstreams/clutter", `{"service_name": "shop/clutter:http", "discovery_type": "kubernetes"}`)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cluttered = true
}

// dump answers as discovery.kubernetes does.
func (f *fake) dump(w http.ResponseWriter) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var endpoints []any
	for service, nodes := range f.discovered {
		ports := map[string][]any{}
		for _, node := range nodes {
			host, port, _ := net.SplitHostPort(node)
			number, _ := strconv.Atoi(port)
			ports["http"] = append(ports["http"], map[string]any{"host": host, "port": number, "weight": 50})
		}
		value, _ := json.Marshal(ports)
		name, _, _ := strings.Cut(service, ":")
		endpoints = append(endpoints, map[string]any{"name": name, "value": string(value)})
	}
	if f.cluttered {
		endpoints = append(endpoints, map[string]any{"name": "shop/clutter", "value": "{torn"})
	}
	all := []any{map[string]any{"endpoints": endpoints}}
	answer(w, http.StatusOK, map[string]any{"config": map[string]any{}, "endpoints": all})
}

func answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body)
}

func refuse(w http.ResponseWriter, status int, text string) {
	answer(w, status, map[string]string{"error_msg": text})
}

func (f *fake) admin(w http.ResponseWriter, r *http.Request, key string) {
	body := map[string]any{}
	if err := json.NewDecoder(r.Body).Decode(&body); (err == nil) != (r.Method != http.MethodGet) {
		f.t.Errorf("%s %s: a GET has no body, and nothing else comes without one: %v", r.Method, key, err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !strings.Contains(key, "/") {
		list := []any{}
		for k, o := range f.objects {
			if strings.HasPrefix(k, key+"/") {
				list = append(list, map[string]any{"key": "/apisix/" + k, "value": o.value, "modifiedIndex": o.version})
			}
		}
		answer(w, http.StatusOK, map[string]any{"total": len(list), "list": list})
		return
	}
	if hold := f.hold; hold != nil && r.Method != http.MethodGet {
		f.hold = nil
		f.mu.Unlock()
		hold()
		f.mu.Lock()
	}
	o := f.objects[key]
	switch r.Method {
	case http.MethodGet:
		if o == nil {
			answer(w, http.StatusNotFound, map[string]string{"message": "Key not found"})
			return
		}
		answer(w, http.StatusOK, map[string]any{"key": "/apisix/" + key, "value": o.value, "modifiedIndex": o.version})
	case http.MethodPut:
		f.store(key, body)
		answer(w, http.StatusCreated, map[string]any{"key": "/apisix/" + key, "value": body})
	case http.MethodPatch:
		f.patches++
		if f.conflicts > 0 {
			f.conflicts--
			refuse(w, http.StatusServiceUnavailable, "value changed before overwritten")
			return
		}
		if other := f.meanwhile; other != nil {
			f.meanwhile = nil
			merge(o.value, other)
		}
		copied := map[string]any{}
		raw, _ := json.Marshal(o.value)
		_ = json.Unmarshal(raw, &copied)
		merge(copied, body)
		if nodes, ok := copied["nodes"].(map[string]any); ok && len(nodes) == 0 {
			copied["nodes"] = []any{}
		}
		if hasNull(copied) {
			refuse(w, http.StatusBadRequest, "invalid configuration: property \"nodes\" validation failed: "+
				"object matches none of the required")
			return
		}
		f.store(key, copied)
		answer(w, http.StatusOK, map[string]any{"key": "/apisix/" + key, "value": copied})
	}
}

// report answers as the plug-in does.
func (f *fake) report() map[string]any {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reap()
	processes, picks := map[string]any{"7": map[string]any{"title": "nginx: cache manager process", "started": "1"}},
		map[string]int{}
	for _, w := range f.workers {
		f.snapshotLive(w)
		title := "nginx: worker process"
		if w.old {
			title += " is shutting down"
		}
		upstreams := map[string]any{}
		discovers := false
		for id, v := range w.reported {
			discovers = discovers || len(v.services) > 0
			if !strings.Contains(id, "/") {
				upstreams[id] = map[string]any{"version": v.version, "nodes": v.nodes}
			}
		}
		p := map[string]any{"title": title, "started": strconv.Itoa(7000 + w.pid)}
		if !w.mute {
			report := map[string]any{"at": seconds(w.at), "counting": true, "upstreams": upstreams}
			if f.observed {
				report["nodes"], report["unlisted"], report["discovers"] = maps.Clone(w.lists), f.unlisted, discovers
			}
			p["report"] = report
		}
		processes[strconv.Itoa(w.pid)] = p
		for k, n := range w.picks {
			picks[fmt.Sprintf("%d %s", w.pid, k)] = n
		}
		for began, n := range w.running {
			picks[fmt.Sprintf("%d * %d", w.pid, began)] = n
		}
	}
	return map[string]any{"now": seconds(time.Now()), "master": strconv.Itoa(f.master()),
		"started": strconv.Itoa(7000 + f.master()), "processes": processes, "picks": picks}
}

func (f *fake) snapshotLive(w *worker) {
	if !w.old && !w.stopped {
		f.snapshot(w)
	}
}

func seconds(t time.Time) float64 { return float64(t.UnixNano()) / 1e9 }

// next returns the worker that takes the next connection. f.mu is held.
func (f *fake) next() *worker {
	live := slices.DeleteFunc(slices.Clone(f.workers), func(w *worker) bool { return w.old || w.stopped })
	if len(live) == 0 {
		return nil
	}
	f.turn++
	return live[f.turn%len(live)]
}

// pick begins a request in a worker. f.mu is held.
func (f *fake) pick(w *worker, id string) (node string, end func()) {
	if !maps.EqualFunc(w.views, w.reported, func(a, b view) bool { return a.version == b.version }) {
		f.snapshot(w) // a request reports first what was not reported when it came
	}
	now, began := w.views[id], w.number
	var usable []string
	for node, weight := range f.nodes(w, id) {
		if weight > 0 {
			usable = append(usable, node)
		}
	}
	if len(usable) == 0 {
		return "", func() {}
	}
	slices.Sort(usable)
	f.turn++
	key := fmt.Sprintf("%s %d", id, now.version)
	w.picks[key]++
	w.running[began]++
	return usable[f.turn/2%len(usable)], func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		if w.picks[key]--; w.picks[key] == 0 {
			delete(w.picks, key)
		}
		if w.running[began]--; w.running[began] == 0 {
			delete(w.running, began)
		}
	}
}

func (f *fake) proxy(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	at := f.next()
	if at == nil {
		f.mu.Unlock()
		w.WriteHeader(http.StatusBadGateway)
		return
	}
	node, end := f.pick(at, cmp.Or(r.URL.Query().Get("pool"), "web"))
	f.mu.Unlock()
	out, err := http.NewRequestWithContext(r.Context(), r.Method, "http://"+node+r.URL.Path, nil)
	if node == "" || err != nil {
		end()
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	out.Header = r.Header.Clone()
	back, err := f.client.Do(out)
	if err != nil {
		end()
		w.WriteHeader(http.StatusBadGateway)
		return
	}
	defer back.Body.Close()
	if r.URL.Path == gatewaytest.StreamPath {
		maps.Copy(w.Header(), back.Header)
		w.WriteHeader(back.StatusCode)
		_ = http.NewResponseController(w).Flush() // it can
		_, _ = io.Copy(w, back.Body)              // the client ends it
		end()
		return
	}
	var body bytes.Buffer
	_, err = io.Copy(&body, back.Body)
	end()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	maps.Copy(w.Header(), back.Header)
	w.WriteHeader(back.StatusCode)
	_, _ = w.Write(body.Bytes())
}
