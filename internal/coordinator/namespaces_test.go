package coordinator

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

var (
	bank  = drain.Service{Namespace: "bank", Name: "core"}
	purse = drain.Pod{Namespace: "bank", Name: "core-1", UID: "uid-core-1"}
)

// postAs posts text as an agent, in which SESSION is its present session.
func postAs(t *testing.T, n *network, r *replica, id drain.AgentID, path, text string) {
	t.Helper()
	r.mu.Lock()
	session := r.core.sessions[id].Number
	r.mu.Unlock()
	text = strings.ReplaceAll(text, "SESSION", fmt.Sprint(session))
	conn, err := n.Dial(t.Context(), "tcp", "replica-0:9444")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	go func() {
		fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer agent "+
			"%s\r\nContent-Length: %d\r\n\r\n%s",
			path, id, len(text), text)
	}()
	if answer, _ := io.ReadAll(conn); !strings.HasPrefix(string(answer), "HTTP/1.1 20") {
		t.Fatalf("%s answers %q", path, answer)
	}
}

// The agents whose names begin with "local" may acknowledge drains in the namespace shop alone.
// What one says of a pod of the namespace bank moves neither its clock nor its phase, and takes no
// capacity of its Service.
func TestAnAgentOfOneNamespaceChangesNoDrainOfAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		one := n.agent("one", []drain.Service{bank}, "replica-0")
		liar, session := n.upgraded("local liar", "replica-0")
		go io.Copy(io.Discard, liar.conn)
		routes, err := json.Marshal(routesOf(store))
		if err != nil {
			t.Fatal(err)
		}
		postAs(t, n, r, "local liar", wire.DeclarationsPath,
			`{"session":SESSION,"gateway":"fake","routes":`+string(routes)+`}`)
		held := r.hold(purse, bank)
		var says []string
		for i := range 4 {
			says = append(says,
				fmt.Sprintf(`{"uid":"uid-core-%d","state":"routing","number":1}`, i),
				fmt.Sprintf(`{"uid":"uid-core-%d","state":"idle","number":1}`, i))
		}
		if _, err := fmt.Fprintf(liar.conn, `{"session":%d,"reports":[%s]}`+"\n", session,
			strings.Join(says, ",")); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		stillHeld(t, held)
		uids := []drain.UID{"uid-core-0", "uid-core-1", "uid-core-2", "uid-core-3"}
		other := drain.Pod{Namespace: "bank", Name: "core-2", UID: "uid-core-2"}
		status, _, _ := r.Drain(t.Context(), Request{
			Pod: other, Targets: []drain.Targets{{Service: bank, Usable: uids}},
		}, time.Now().Add(time.Millisecond))
		if status.Phase != drain.Unrouting {
			t.Errorf("the next drain is %s", status.Phase)
		}
		time.Sleep(time.Second)
		one.say(purse, drain.Idle)
		answered(t, held, "Released Acknowledged held=true after 1.001s")
	})
}

// An agent is told of no pod in a namespace in which it has no right, whether that pod is deleted
// or lives on, and of the pods of a Service that it declares later.
func TestAnAgentOfOneNamespaceIsToldNoUIDOfAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		n.agent("one", []drain.Service{bank, web}, "replica-0")
		stream := n.open("local spy", "replica-0")
		told := make(chan string, 10)
		go func() {
			defer close(told)
			for {
				m, ok := stream.next(t)
				if !ok {
					return
				}
				switch m.Type {
				case wire.TypeReleases:
					told <- fmt.Sprint(m.Releases.UIDs, " dead=", m.Releases.Terminating)
				case wire.TypeDrains:
					told <- fmt.Sprint(m.Drains.Pods)
				}
			}
		}()
		r.lives.set(purse.UID, Living)
		r.hold(purse, bank)
		r.hold(pod("a"), web)
		r.hold(drain.Pod{Namespace: "bank", Name: "core-2", UID: "uid-core-2"}, bank)
		r.GatePassed("uid-core-2")
		r.GatePassed(pod("a").UID)
		time.Sleep(60 * time.Second) // the drain of purse is abandoned
		select {
		case text := <-told:
			t.Errorf("told of %s before it has declared anything", text)
		default:
		}
		routes, err := json.Marshal(routesOf(web))
		if err != nil {
			t.Fatal(err)
		}
		postAs(t, n, r, "local spy", wire.DeclarationsPath,
			`{"session":SESSION,"gateway":"fake","routes":`+string(routes)+`}`)
		synctest.Wait()
		stream.conn.Close()
		var all []string
		for text := range told {
			all = append(all, text)
		}
		if got := strings.Join(all, ", "); got != "[uid-a] dead=true" {
			t.Errorf("told of %q, want the pod of its namespace alone", got)
		}
	})
}
