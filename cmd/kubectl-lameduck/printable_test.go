package main

import (
	"strings"
	"testing"

	"github.com/lameduck-io/lameduck/internal/cli"
	"github.com/lameduck-io/lameduck/internal/dashboard/api"
)

// What agents call themselves, and why a pod waits, is text of tenants. A coordinator of an earlier
// version passes it on as it is: no sequence of it may reach the terminal, and none may forge a
// row.
func TestTextOfAgentsIsPrintedAsText(t *testing.T) {
	var out strings.Builder
	terminal := cli.Printable{Writer: &out}
	agents := []api.Agent{{ID: "1", Name: "tenant/gw", Gateway: "x\x1b]52;c;cm0K\a\nforged\trow",
		GatewayMode: "\u009b2J\u202e", State: "connected", Connected: true, Declared: true,
		Features: []string{"\x1b[H"}}}
	writeStatus(merge([]answer[api.View]{{replica: &replica{name: "one"},
		said: api.View{Agents: api.Agents{Items: agents}}}}), true, terminal)
	writeExplanation(explained{Explanation: api.Explanation{Namespace: "shop", Pod: "web", Uncovered: []api.Uncovered{
		{What: "Ingress shop/web", Why: "no gateway of its class \x1b[2J is declared"}}}}, terminal)
	if i := strings.IndexAny(out.String(), "\x1b\a\u009b\u202e\t"); i >= 0 {
		t.Errorf("at %d of %q", i, out.String())
	}
	if strings.Contains(out.String(), "\nforged") {
		t.Errorf("a row is forged: %q", out.String())
	}
}
