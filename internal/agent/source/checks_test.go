package source

import (
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// Every pool that a Service feeds follows its annotation, and goes back to the file when that is
// taken away or the Service is deleted, also after an annotation that was refused.
func TestChecksGoBackToTheFile(t *testing.T) {
	routes := []gateway.Route{
		{Service: "shop/web", Port: "http", Pool: "web", HealthCheck: "{path: /web}"},
		{Service: "shop/web", Port: "admin", Pool: "admin", HealthCheck: "{path: /admin}"},
		{Service: "shop/other", Pool: "other", HealthCheck: "{path: /other}"},
	}
	set := health.New(health.Options{})
	for n, pool := range []health.Pool{"web", "admin", "other"} {
		e := health.Endpoint{Target: health.Target{UID: "a",
			Addr: netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), uint16(80+n))}, Routable: true}
		set.Change(time.Now(), pool, []health.Change{{Endpoint: e}})
	}
	c, err := NewChecks(fake.NewClientset(), routes, true, set, func() {}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	at := time.Now()
	paths := func() string {
		probed := map[health.Pool]string{}
		for n := 0; n < 1200 && len(probed) < 3; n++ { // an interval, and some
			at = at.Add(10 * time.Millisecond)
			jobs, _ := set.Due(at, nil, 10)
			for _, j := range jobs {
				probed[j.Key.Pool] = j.Check.Path
				set.Report(at, j, health.Outcome{Kind: health.Success, Code: 200})
			}
		}
		return fmt.Sprint(probed)
	}
	service := func(check string) *corev1.Service {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}}
		if check != "" {
			s.Annotations = map[string]string{health.CheckAnnotation: check}
		}
		return s
	}
	// of also has a check of a port's own.
	of := func(all, port, check string) *corev1.Service {
		s := service(all)
		if s.Annotations == nil {
			s.Annotations = map[string]string{}
		}
		s.Annotations[health.CheckAnnotation+"."+port] = check
		return s
	}
	each := of("", "admin", "{path: /y}")
	delete(each.Annotations, health.CheckAnnotation)
	each.Annotations[health.CheckAnnotation+".http"] = "{path: /v}"
	const ofFile, annotated = "map[admin:/admin other:/other web:/web]", "map[admin:/x other:/other web:/x]"
	for _, step := range []struct {
		what    string
		heard   *corev1.Service
		gone    bool
		want    string
		refused int
	}{
		{"no annotation", service(""), false, ofFile, 0},
		{"annotation", service("{path: /x}"), false, annotated, 0},
		{"refused annotation", service("{path: x}"), false, annotated, 1},
		{"deleted with a refused annotation", service("{path: x}"), true, ofFile, 0},
		{"made again", service("{path: /x}"), false, annotated, 0},
		{"deleted", service("{path: /x}"), true, ofFile, 0},
		{"annotation again", service("{path: /x}"), false, annotated, 0},
		{"annotation taken away", service(""), false, ofFile, 0},
		{"of one port", of("", "admin", "{path: /y}"), false, "map[admin:/y other:/other web:/web]", 0},
		{"of one port before all", of("{path: /x}", "admin", "{path: /y}"), false, "map[admin:/y other:/other web:/x]",
			0},
		{"of one port, refused", of("{path: /z}", "admin", "{path: y}"), false, "map[admin:/y other:/other web:/z]", 1},
		{"of all, refused", of("{path: z}", "admin", "{path: /y}"), false, "map[admin:/y other:/other web:/z]", 1},
		{"of one port, taken away", service("{path: /x}"), false, annotated, 0},
		{"of all, refused again", service("{path: z}"), false, annotated, 1},
		{"of each port", each, false, "map[admin:/y other:/other web:/v]", 0},
		{"of one port, that nothing routes to", of("", "metrics", "{path: y}"), false, ofFile, 0},
	} {
		c.heard(step.heard, step.gone)
		if got := paths(); got != step.want || c.Refusals() != step.refused {
			t.Errorf("%s: probed are %s with %d refused, want %s with %d", step.what, got, c.Refusals(), step.want,
				step.refused)
		}
	}
}

// Redirected to another pod, the clients of these would reach the wrong one.
func TestServicesOfSinglePodsAreRefused(t *testing.T) {
	set := health.New(health.Options{})
	routes := []gateway.Route{
		{Service: "shop/web", Pool: "web"},
		{Service: "shop/control", Pool: "control", HealthCheck: "{path: /}"},
	}
	c, err := NewChecks(fake.NewClientset(), routes, true, set, func() {}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	refused := map[health.Pool]string{}
	c.Refuse = func(pool health.Pool, why string) { refused[pool] = why }
	for _, tt := range []struct {
		spec corev1.ServiceSpec
		want string
	}{
		{corev1.ServiceSpec{ClusterIP: "10.0.0.1"}, ""},
		{corev1.ServiceSpec{ClusterIP: corev1.ClusterIPNone}, "headless"},
		{corev1.ServiceSpec{ClusterIP: "10.0.0.1", SessionAffinity: corev1.ServiceAffinityClientIP}, "ClientIP"},
		{corev1.ServiceSpec{ClusterIP: "10.0.0.1", SessionAffinity: corev1.ServiceAffinityNone}, ""},
	} {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web",
			Annotations: map[string]string{health.CheckAnnotation: "{path: /}"}}, Spec: tt.spec}
		c.heard(s, false)
		if got := refused["web"]; (got == "") != (tt.want == "") || !strings.Contains(got, tt.want) {
			t.Errorf("%+v: %q", tt.spec, got)
		}
	}
	c.heard(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "control"},
		Spec: corev1.ServiceSpec{ClusterIP: "10.0.0.2"}}, false)
	e := health.Endpoint{Target: health.Target{UID: "a", Addr: netip.MustParseAddrPort("10.0.0.1:80")}, Routable: true}
	at := time.Now()
	set.Change(at, "web", []health.Change{{Endpoint: e}})
	set.Change(at, "control", []health.Change{{Endpoint: e}})
	probed := map[health.Pool]int{}
	for range 1200 { // an interval is 10 s
		at = at.Add(10 * time.Millisecond)
		jobs, _ := set.Due(at, nil, 10)
		for _, j := range jobs {
			probed[j.Key.Pool]++
			set.Report(at, j, health.Outcome{Kind: health.Success, Code: 200})
		}
	}
	if probed["web"] > 0 || probed["control"] == 0 || refused["control"] != "" {
		t.Errorf("probes by pool: %v, refused: %q; want probes of control alone", probed, refused)
	}
}
