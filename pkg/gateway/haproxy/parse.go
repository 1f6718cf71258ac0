package haproxy

import (
	"encoding/csv"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// Administrative states of a server, srv_admin_state of "show servers state" (HAProxy's
// include/haproxy/server-t.h).
const (
	adminForcedMaint    = 0x01 // "set server state maint", or disabled in the configuration
	adminInheritedMaint = 0x02 // the server it tracks is in maintenance
	adminForcedDrain    = 0x08
	adminInheritedDrain = 0x10
	adminResolveMaint   = 0x20 // its name has no address

	// adminNoBalance: the balancer does not choose the server.
	adminNoBalance = adminForcedMaint | adminInheritedMaint | adminForcedDrain | adminInheritedDrain | adminResolveMaint
)

// process is one line of "show proc".
type process struct {
	PID int
	// Old: the master lists it as an old worker. It may serve all the same (Gateway.stopping).
	Old bool
}

// processes is the answer to "show proc" without the times, which change by themselves.
type processes struct {
	Master  int
	Reloads string // "4 [failed: 1]"
	Workers []process
}

const (
	procBegin  = "#<PID>"
	stateBegin = "1\n# be_id be_name"
	statBegin  = "# pxname,svname,"
	infoBegin  = "Name: HAProxy"
	sessBegin  = "0x"
)

func parseProcesses(s string) (processes, error) {
	var p processes
	section := ""
	for i, line := range strings.Split(strings.TrimRight(s, "\n"), "\n") {
		if i == 0 {
			if !strings.HasPrefix(line, procBegin) {
				return p, fmt.Errorf("first line is %q", line)
			}
			continue
		}
		if strings.HasPrefix(line, "#") {
			section = strings.TrimSpace(strings.TrimPrefix(line, "#"))
			continue
		}
		f := strings.Fields(line)
		if len(f) == 0 {
			continue
		}
		if len(f) < 3 {
			return p, fmt.Errorf("line %d: %q", i+1, line)
		}
		pid, err := strconv.Atoi(f[0])
		if err != nil || pid <= 0 {
			return p, fmt.Errorf("line %d: pid %q", i+1, f[0])
		}
		switch f[1] {
		case "master":
			if p.Master != 0 {
				return p, fmt.Errorf("line %d: a second master", i+1)
			}
			p.Master = pid
			p.Reloads = f[2]
			if _, rest, ok := strings.Cut(line, "["); ok {
				if failed, _, ok := strings.Cut(rest, "]"); ok {
					p.Reloads += " [" + failed + "]"
				}
			}
		case "worker":
			p.Workers = append(p.Workers, process{PID: pid, Old: section == "old workers"})
		}
	}
	if p.Master == 0 {
		return p, fmt.Errorf("no master")
	}
	return p, nil
}

func (p processes) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d/%s", p.Master, p.Reloads)
	for _, w := range p.Workers {
		fmt.Fprintf(&b, " %d", w.PID)
		if w.Old {
			b.WriteString("-old")
		}
	}
	return b.String()
}

// server is one line of "show servers state".
type server struct {
	Backend int    // the number of its backend
	Of      string // the name of its backend
	Name    string
	Addr    netip.AddrPort // zero if the server has no address yet, or is no IP server
	Admin   int
}

func (s *server) takenOut() bool { return s.Admin&adminForcedMaint != 0 }
func (s *server) balanced() bool { return s.Admin&adminNoBalance == 0 }

// parseState reads "show servers state <backend>", or of all backends if backend is empty. Columns
// are found by their names.
func parseState(s, backend string) ([]server, error) {
	lines := strings.Split(strings.TrimRight(s, "\n"), "\n")
	if len(lines) < 2 || lines[0] != "1" || !strings.HasPrefix(lines[1], "# ") {
		return nil, fmt.Errorf("no header of version 1 in %q", shorten(s))
	}
	names := strings.Fields(lines[1][2:])
	cols, err := columns(names, "be_id", "be_name", "srv_name", "srv_addr", "srv_admin_state", "srv_port")
	if err != nil {
		return nil, err
	}
	var out []server
	for n, line := range lines[2:] {
		f := strings.Fields(line)
		if len(f) != len(names) {
			return nil, fmt.Errorf("line %d has %d columns of %d: %q", n+3, len(f), len(names), line)
		}
		if of := f[cols[1]]; backend != "" && of != backend {
			return nil, fmt.Errorf("line %d is of backend %q, not %q", n+3, of, backend)
		}
		number := func(i, bits int) int {
			v, e := strconv.ParseUint(f[cols[i]], 10, bits)
			if e != nil {
				err = fmt.Errorf("line %d: %s %q", n+3, names[cols[i]], f[cols[i]])
			}
			return int(v)
		}
		srv := server{Backend: number(0, 31), Of: f[cols[1]], Name: f[cols[2]], Admin: number(4, 16)}
		port := number(5, 16)
		if err != nil {
			return nil, err
		}
		// The address is "-" before the name is resolved, and a path for a unix socket.
		if a, err := netip.ParseAddr(f[cols[3]]); err == nil {
			srv.Addr = netip.AddrPortFrom(a, uint16(port))
		}
		out = append(out, srv)
	}
	return out, nil
}

// columns returns the index of each name in a header.
func columns(head []string, names ...string) ([]int, error) {
	cols := make([]int, len(names))
	for i, name := range names {
		if cols[i] = slices.Index(head, name); cols[i] < 0 {
			return nil, fmt.Errorf("no column %s", name)
		}
	}
	return cols, nil
}

// traffic is the load of one server, from its line of "show stat".
type traffic struct {
	Current int // scur: assigned and connecting, or connected
	Queued  int // qcur: waiting for this server
}

// parseStat reads "show stat <backend> 4 -1", by server name.
func parseStat(s, backend string) (map[string]traffic, error) {
	r := csv.NewReader(strings.NewReader(strings.TrimPrefix(s, "# ")))
	r.FieldsPerRecord = -1
	rows, err := r.ReadAll()
	if err != nil {
		return nil, err
	}
	if len(rows) == 0 {
		return nil, fmt.Errorf("no header")
	}
	cols, err := columns(rows[0], "pxname", "svname", "qcur", "scur")
	if err != nil {
		return nil, err
	}
	out := make(map[string]traffic, len(rows)-1)
	for n, row := range rows[1:] {
		get := func(i int) string {
			if cols[i] < len(row) {
				return row[cols[i]]
			}
			return ""
		}
		num := func(i int) int {
			v, e := strconv.Atoi(get(i))
			if e != nil || v < 0 {
				err = fmt.Errorf("line %d: column %s is %q", n+2, rows[0][cols[i]], get(i))
			}
			return v
		}
		if get(0) != backend {
			return nil, fmt.Errorf("line %d is of proxy %q, not %q", n+2, get(0), backend)
		}
		t := traffic{Queued: num(2), Current: num(3)}
		if err != nil {
			return nil, err
		}
		if _, ok := out[get(1)]; ok {
			return nil, fmt.Errorf("line %d: server %q for the second time", n+2, get(1))
		}
		out[get(1)] = t
	}
	return out, nil
}

// info has the fields of "show info" that are used here.
type info struct {
	PID      int
	Start    string // Start_time_sec: tells two processes with one pid apart
	Stopping bool
	Clients  int // CurrConns: client connections, idle ones included
}

func parseInfo(s string) (info, error) {
	var in info
	seen := map[string]bool{}
	for line := range strings.Lines(s) {
		k, v, ok := strings.Cut(strings.TrimSpace(line), ":")
		if !ok {
			continue
		}
		v = strings.TrimSpace(v)
		var err error
		switch k {
		case "Pid":
			in.PID, err = strconv.Atoi(v)
		case "Start_time_sec":
			in.Start = v
		case "Stopping":
			in.Stopping = v != "0"
		case "CurrConns":
			in.Clients, err = strconv.Atoi(v)
		default:
			continue
		}
		if err != nil || v == "" {
			return in, fmt.Errorf("%s is %q", k, v)
		}
		if seen[k] {
			return in, fmt.Errorf("%s for the second time", k)
		}
		seen[k] = true
	}
	for _, k := range []string{"Pid", "Stopping", "CurrConns"} {
		if !seen[k] {
			return in, fmt.Errorf("no line %s", k)
		}
	}
	return in, nil
}

// unattributed is the key of streams of which HAProxy does not name the server.
const unattributed = "?"

// streams are those in "show sess".
type streams struct {
	// byServer counts them, by backend/server.
	byServer map[string]int
	// unnamed are the ids of those of which the list names no backend: their client has neither an
	// IP nor a unix address, because HAProxy itself has begun them, to a peer for example.
	unnamed []string
}

func parseStreams(s string) (streams, error) {
	out := streams{byServer: map[string]int{}}
	for line := range strings.Lines(s) {
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		if !strings.HasPrefix(line, sessBegin) {
			return streams{}, fmt.Errorf("line %q", shorten(line))
		}
		var be, srv string
		for _, f := range strings.Fields(line) {
			if v, ok := strings.CutPrefix(f, "be="); ok {
				be = v
			} else if v, ok := strings.CutPrefix(f, "srv="); ok {
				srv = v
				break
			}
		}
		if id, _, _ := strings.Cut(line, ":"); be == "" || srv == "" {
			out.unnamed = append(out.unnamed, id)
		} else {
			out.byServer[be+"/"+srv]++
		}
	}
	return out, nil
}

// parseStream reads "show sess <id>": the backend/server of the stream, or unattributed. Empty: the
// stream has ended.
func parseStream(s string) string {
	if strings.TrimSpace(s) == "Session not found." {
		return ""
	}
	var be, srv string
	for line := range strings.Lines(s) {
		name, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		if v, ok := strings.CutPrefix(name, "backend="); ok {
			be = v
		} else if v, ok := strings.CutPrefix(name, "server="); ok {
			srv = v
		}
	}
	if be == "" || srv == "" {
		return unattributed
	}
	return be + "/" + srv
}

// parseTunnels counts the client connections in "show sess all" on which no further request can
// arrive, whatever the client sends. These are tunnels, in TCP mode or after a 101, without a
// multiplexer that could begin another stream.
func parseTunnels(s string) (int, error) {
	n := 0
	var tcp, upgraded, through bool
	end, mux := "", ""
	finish := func() {
		if through && (tcp && mux == "PASS" || upgraded && mux == "H1") {
			n++
		}
		tcp, upgraded, through, end, mux = false, false, false, "", ""
	}
	for line := range strings.Lines(s) {
		if strings.HasPrefix(line, sessBegin) {
			finish()
			continue
		}
		f := strings.Fields(line)
		if len(f) == 0 {
			continue
		}
		if line[0] != ' ' {
			return 0, fmt.Errorf("line %q", shorten(line))
		}
		switch name, _, _ := strings.Cut(f[0], "="); name {
		case "frontend":
			// GLOBAL is the frontend of this command. "show info" does not count it among the
			// clients.
			tcp = strings.Contains(line, " mode=tcp)") && f[0] != "frontend=GLOBAL"
		case "txn":
			upgraded = slices.Contains(f, "status=101") && slices.Contains(f, "rsp.st=MSG_TUNNEL")
		case "scf", "scb":
			end = name
			if end == "scb" {
				through = slices.Contains(f, "state=EST")
			}
		case "co0":
			if end == "scf" {
				for _, w := range f {
					if v, ok := strings.CutPrefix(w, "mux="); ok {
						mux = v
					}
				}
			}
		}
	}
	finish()
	return n, nil
}
