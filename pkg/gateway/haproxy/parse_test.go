package haproxy

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// What HAProxy 2.6.12 wrote.
const (
	realProc = `#<PID>          <type>          <reloads>       <uptime>        <version>      
8802            master          4 [failed: 1]   0d00h10m47s     2.6.12-1+deb12u4
# workers
24292           worker          0               0d00h00m01s     2.6.12-1+deb12u4
# old workers
12721           worker          3               0d00h10m07s     2.6.12-1+deb12u4
# programs

`
	realState = `1
# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_iweight srv_time_since_last_change srv_check_status srv_check_result srv_check_health srv_check_state srv_agent_state bk_f_forced_id srv_f_forced_id srv_fqdn srv_port srvrecord srv_use_ssl srv_check_port srv_check_addr srv_agent_addr srv_agent_port
4 web 2 ld-2 127.0.0.3 0 1 1 1 3 1 0 0 2 0 0 0 - 9001 - 1 0 - - 0
4 web 3 named - 0 1 1 1 3 1 0 0 0 0 0 0 nohost.invalid 9001 - 0 0 - - 0
4 web 5 ld-7 ::1 0 5 1 1 2 1 0 0 0 0 0 0 - 9001 - 0 0 - - 0

`
	realInfo = "Name: HAProxy\nVersion: 2.6.12-1+deb12u4\nNbthread: 2\nPid: 8813\nUptime: 0d 0h00m01s\nCurrConns: " +
		"3\nStopping: 1\nnode: vm\nStart_time_sec: 1795194122\nTainted: 0\n\n"
	realSess = `0x564e30339130: proto=tcpv4 src=127.0.0.1:36744 fe=f be=b srv=s1 ts=00 epoch=0 age=3s calls=3 rate=1 cpu=0 lat=0 rq[f=49c40000h,i=0,an=8000h,rx=,wx=,ax=] rp[f=80400000h,i=0,an=1400000h,rx=4m57s,wx=,ax=] scf=[8,80h,fd=15] scb=[8,11h,fd=17] exp=4m57s rc=0 c_exp=
0x564e3045f5e0: proto=tcpv4 src=127.0.0.1:50130 fe=ft be=bt srv=s1 ts=00 epoch=0 age=3s calls=3 rate=0 cpu=0 lat=0 rq[f=848000h,i=0,an=00h,rx=4m57s,wx=,ax=] rp[f=80048000h,i=0,an=00h,rx=4m57s,wx=,ax=] scf=[8,0h,fd=20] scb=[8,1h,fd=21] exp=4m57s rc=0 c_exp=
0x7fd4b8042150: proto=sockpair src=unix:1 fe=GLOBAL be=<NONE> srv=<none> ts=00 epoch=0x1 age=0s calls=1 rate=0 cpu=0 lat=0 rq[f=c08000h,i=0,an=00h,rx=,wx=,ax=] rp[f=80008002h,i=0,an=00h,rx=,wx=,ax=] scf=[8,200h,fd=6] scb=[8,1h,fd=-1] exp= rc=0 c_exp=

`
	// The stream that HAProxy 2.6 has begun to a peer.
	realPeer = `0x559fa2477e00: [28/Nov/2026:07:17:15.786637] id=0 proto=?
  flags=0x2, conn_retries=0, conn_exp=<NEVER> conn_et=0x000 srv_conn=(nil), pend_pos=(nil) waiting=0 epoch=0
  frontend=one (id=4294967295 mode=peers), listener=? (id=0)
  backend=one (id=4294967295 mode=peers) addr=127.0.0.1:35016
  server=<none> (id=0) addr=127.0.0.1:45069

`
	// One stream in TCP mode, one after a 101, one HTTP/2 stream after a 101, one TCP stream that
	// became HTTP, one that waits for its answer, one that still connects, and the command itself.
	realSessAll = `0x1: [20/Nov/2026:17:33:34.764239] id=3 proto=tcpv4 source=127.0.0.1:50130
  frontend=ft (id=3 mode=tcp), listener=? (id=1) addr=127.0.0.1:18082
  server=s1 (id=1) addr=127.0.0.2:9101
  scf=0x564e3045f4f0 flags=0x00000000 state=EST endp=CONN,0x564e3045f4f0,0x028c0001 sub=1
      co0=0x7fd4b8042b50 ctrl=tcpv4 xprt=RAW mux=PASS data=STRM target=LISTENER:0x564e3026ea00
  scb=0x564e3036aba0 flags=0x00000001 state=EST endp=CONN,0x564e3045fe10,0x028c0001 sub=1
      co1=0x564e3045fbf0 ctrl=tcpv4 xprt=RAW mux=PASS data=STRM target=SERVER:0x564e302731f0
0x2: [20/Nov/2026:17:33:34.663683] id=0 proto=tcpv4 source=127.0.0.1:36744
  frontend=f (id=1 mode=http), listener=? (id=1) addr=127.0.0.1:18081
  txn=0x564e3045a0d0 flags=0x3000 meth=1 status=101 req.st=MSG_TUNNEL rsp.st=MSG_TUNNEL req.f=0x4c rsp.f=0x00
  scf=0x564e30263e20 flags=0x00000080 state=EST endp=CONN,0x564e30459e40,0x00804001 sub=0
      co0=0x564e30458290 ctrl=tcpv4 xprt=RAW mux=H1 data=STRM target=LISTENER:0x564e3026ab60
  scb=0x564e303f9990 flags=0x00000011 state=EST endp=CONN,0x564e3045a5d0,0x02800001 sub=1
      co1=0x564e3045a1c0 ctrl=tcpv4 xprt=RAW mux=H1 data=STRM target=SERVER:0x564e302707b0
0x3: [20/Nov/2026:17:33:34.663683] id=0 proto=tcpv4 source=127.0.0.1:36744
  frontend=f (id=1 mode=http), listener=? (id=1) addr=127.0.0.1:18081
  txn=0x564e3045a0d0 flags=0x3000 meth=1 status=101 req.st=MSG_TUNNEL rsp.st=MSG_TUNNEL req.f=0x4c rsp.f=0x00
  scf=0x564e30263e20 flags=0x00000080 state=EST endp=CONN,0x564e30459e40,0x00804001 sub=0
      co0=0x564e30458290 ctrl=tcpv4 xprt=RAW mux=H2 data=STRM target=LISTENER:0x564e3026ab60
  scb=0x564e303f9990 flags=0x00000011 state=EST endp=CONN,0x564e3045a5d0,0x02800001 sub=1
0x4: [20/Nov/2026:17:33:34.764239] id=3 proto=tcpv4 source=127.0.0.1:50130
  frontend=ft (id=3 mode=tcp), listener=? (id=1) addr=127.0.0.1:18082
  scf=0x564e3045f4f0 flags=0x00000000 state=EST endp=CONN,0x564e3045f4f0,0x028c0001 sub=1
      co0=0x7fd4b8042b50 ctrl=tcpv4 xprt=RAW mux=H1 data=STRM target=LISTENER:0x564e3026ea00
  scb=0x564e3036aba0 flags=0x00000001 state=EST endp=CONN,0x564e3045fe10,0x028c0001 sub=1
0x5: [20/Nov/2026:17:33:34.663683] id=0 proto=tcpv4 source=127.0.0.1:36744
  frontend=f (id=1 mode=http), listener=? (id=1) addr=127.0.0.1:18081
  txn=0x564e3045a0d0 flags=0x3000 meth=1 status=-1 req.st=MSG_DONE rsp.st=MSG_RPBEFORE req.f=0x4c rsp.f=0x00
  scf=0x564e30263e20 flags=0x00000080 state=EST endp=CONN,0x564e30459e40,0x00804001 sub=0
      co0=0x564e30458290 ctrl=tcpv4 xprt=RAW mux=H1 data=STRM target=LISTENER:0x564e3026ab60
  scb=0x564e303f9990 flags=0x00000011 state=EST endp=CONN,0x564e3045a5d0,0x02800001 sub=1
0x6: [20/Nov/2026:17:33:34.764239] id=3 proto=tcpv4 source=127.0.0.1:50130
  frontend=ft (id=3 mode=tcp), listener=? (id=1) addr=127.0.0.1:18082
  scf=0x564e3045f4f0 flags=0x00000000 state=EST endp=CONN,0x564e3045f4f0,0x028c0001 sub=1
      co0=0x7fd4b8042b50 ctrl=tcpv4 xprt=RAW mux=PASS data=STRM target=LISTENER:0x564e3026ea00
  scb=0x564e3036aba0 flags=0x00000001 state=CON endp=CONN,0x564e3045fe10,0x028c0001 sub=1
0x7: [20/Nov/2026:17:33:36.959408] id=6 proto=sockpair source=unix:1
  frontend=GLOBAL (id=0 mode=tcp), listener=? (id=1)
  scf=0x7fd4b80420e0 flags=0x00000200 state=EST endp=CONN,0x7fd4b8039e80,0x028c0001 sub=1
      co0=0x7fd4b8039ed0 ctrl=sockpair xprt=RAW mux=PASS data=STRM target=LISTENER:0x564e30264180
  scb=0x7fd4b8042660 flags=0x00000001 state=EST endp=APPCTX,0x7fd4b8046e50,0x02800002 sub=0

`
)

func TestParse(t *testing.T) {
	procs, err := parseProcesses(realProc)
	if diff := cmp.Diff(processes{Master: 8802, Reloads: "4 [failed: 1]",
		Workers: []process{{PID: 24292}, {PID: 12721, Old: true}}}, procs); diff != "" || err != nil {
		t.Errorf("show proc: %v\n%s", err, diff)
	}
	servers, err := parseState(realState, "web")
	if diff := cmp.Diff([]server{
		{Backend: 4, Of: "web", Name: "ld-2", Addr: netip.MustParseAddrPort("127.0.0.3:9001"), Admin: 1},
		{Backend: 4, Of: "web", Name: "named", Admin: 1},
		{Backend: 4, Of: "web", Name: "ld-7", Addr: netip.MustParseAddrPort("[::1]:9001"), Admin: 5},
	}, servers, cmpopts.EquateComparable(netip.AddrPort{})); diff != "" || err != nil {
		t.Errorf("show servers state: %v\n%s", err, diff)
	}
	if _, err := parseState(realState, "other"); err == nil {
		t.Error("servers of another backend are accepted")
	}
	in, err := parseInfo(realInfo)
	if diff := cmp.Diff(info{PID: 8813, Start: "1795194122", Stopping: true, Clients: 3}, in); diff != "" ||
		err != nil {
		t.Errorf("show info: %v\n%s", err, diff)
	}
	streams, err := parseStreams(realSess)
	if diff := cmp.Diff(map[string]int{"b/s1": 1, "bt/s1": 1, "<NONE>/<none>": 1}, streams.byServer); diff != "" ||
		err != nil {
		t.Errorf("show sess: %v\n%s", err, diff)
	}
	for answer, want := range map[string]string{
		realPeer: "one/<none>", "Session not found.\n\n": "", realPeer[:90]: unattributed,
		"0x1: id=0 proto=?\n  backend=r (id=4 mode=tcp) addr=?\n  server=s (id=1) addr=127.0.0.1:5\n\n": "r/s",
	} {
		if got := parseStream(answer); got != want {
			t.Errorf("show sess <id>: %q, want %q, of\n%s", got, want, answer)
		}
	}
	if n, err := parseTunnels(realSessAll); n != 2 || err != nil {
		t.Errorf("show sess all: %d tunnels, %v; want 2", n, err)
	}
	stat, err := parseStat("# pxname,svname,qcur,qmax,scur,smax,wretr,desc,\n"+
		"web,ld-2,1,2,3,9,4,\"a, \"\"b\"\"\n\",\n\n", "web")
	if diff := cmp.Diff(map[string]traffic{"ld-2": {Current: 3, Queued: 1}}, stat); diff != "" || err != nil {
		t.Errorf("show stat: %v\n%s", err, diff)
	}
}

// Whatever comes, the parsers neither panic nor find something in a listing from which a part was
// cut off without saying so.
func FuzzParse(f *testing.F) {
	for _, s := range []string{realProc, realState, realInfo, realSess, realSessAll,
		"# pxname,svname,qcur,qmax,scur,smax,wretr\nweb,s,1,2,3,4,5\n\n", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if p, err := parseProcesses(s); err == nil && p.Master == 0 {
			t.Error("processes without a master")
		}
		if list, err := parseState(s, "web"); err == nil {
			lines := strings.Count(strings.TrimRight(s, "\n"), "\n") + 1
			if len(list) != lines-2 {
				t.Errorf("%d servers in %d lines", len(list), lines)
			}
		}
		if m, err := parseStat(s, "web"); err == nil {
			for name, x := range m {
				if x.Current < 0 || x.Queued < 0 {
					t.Errorf("%s: %+v", name, x)
				}
			}
		}
		parseInfo(s)
		parseStreams(s)
		parseStream(s)
		parseTunnels(s)
		parseName(s)
		if w, err := parseFile([]byte(s)); err == nil {
			for be, names := range w {
				for name := range names {
					if _, ok := parseName(name); !ok || !nameChars(be) {
						t.Errorf("%s/%s is read from the file", be, name)
					}
				}
			}
		}
		if classify(s) != kindUnknown && strings.TrimSpace(s) == "" {
			t.Error("nothing is classified")
		}
	})
}
