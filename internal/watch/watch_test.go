package watch

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Nothing here guards against an API server that lags behind the one that was watched before: a
// list with older views would take new pods out of gateways. client-go does. After an interruption
// it asks for a list that is no older than what it has seen, and if the server cannot give one, for
// the newest. If this test fails, decision 10 has to be thought about again.
func TestListsDoNotGoBackInTime(t *testing.T) {
	for _, streams := range []bool{false, true} {
		t.Run(fmt.Sprintf("streams=%t", streams), func(t *testing.T) {
			var mu sync.Mutex
			var asked []string
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				q := r.URL.Query()
				lists := q.Get("watch") == "" || q.Get("sendInitialEvents") == "true"
				w.Header().Set("Content-Type", "application/json")
				refuse := func(code int, reason metav1.StatusReason, cause metav1.CauseType) {
					w.WriteHeader(code)
					_ = json.NewEncoder(w).Encode(metav1.Status{
						TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusFailure,
						Code: int32(code), Reason: reason,
						Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: cause}}}})
				}
				if q.Get("sendInitialEvents") == "true" && !streams {
					refuse(http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, "")
					return
				}
				mu.Lock()
				n := len(asked)
				if lists {
					asked = append(asked, q.Get("resourceVersion")+q.Get("resourceVersionMatch"))
				}
				mu.Unlock()
				event := func(kind string, object any) {
					_ = json.NewEncoder(w).Encode(map[string]any{"type": kind, "object": object})
					w.(http.Flusher).Flush()
				}
				switch {
				case lists && n == 1:
					refuse(http.StatusGatewayTimeout, metav1.StatusReasonTimeout,
						metav1.CauseTypeResourceVersionTooLarge)
				case lists && streams:
					event("ADDED", slice("100"))
					end := slice("100")
					end.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
					event("BOOKMARK", end)
					event("MODIFIED", slice("120"))
				case lists:
					_ = json.NewEncoder(w).Encode(discovery.EndpointSliceList{
						ListMeta: metav1.ListMeta{ResourceVersion: "100"},
						Items:    []discovery.EndpointSlice{*slice("100")}})
					return
				default:
					event("MODIFIED", slice("120"))
				}
				if n < 2 && !(lists && n == 1) {
					event("ERROR", metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
						Status: metav1.StatusFailure, Code: http.StatusGone, Reason: metav1.StatusReasonExpired})
				}
			}))
			defer server.Close()
			kube, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
			if err != nil {
				t.Fatal(err)
			}
			w, err := New(kube, Options[*discovery.EndpointSlice]{Informer: EndpointSlices, Namespace: "shop",
				Changed: func(_, _ *discovery.EndpointSlice) {}})
			if err != nil {
				t.Fatal(err)
			}
			go func() { _ = w.Run(t.Context()) }()
			want := []string{"0", "120", ""}
			if streams {
				want = []string{"NotOlderThan", "120NotOlderThan", "NotOlderThan"}
			}
			for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
				mu.Lock()
				got := slices.Clone(asked)
				mu.Unlock()
				if len(got) >= len(want) || time.Now().After(end) {
					if !slices.Equal(got[:min(len(got), len(want))], want) {
						t.Fatalf("lists are asked for as of %q, want %q", got, want)
					}
					return
				}
			}
		})
	}
}

func slice(version string) *discovery.EndpointSlice {
	return &discovery.EndpointSlice{TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web-1", ResourceVersion: version}}
}
