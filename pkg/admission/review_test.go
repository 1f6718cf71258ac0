package admission

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/internal/serve"
)

func text(review *admissionv1.AdmissionReview) string {
	body, err := json.Marshal(review)
	if err != nil {
		panic(err)
	}
	return string(body)
}

// What is not a review that the webhook understands is refused in words, and changes nothing.
func TestMalformedReviews(t *testing.T) {
	pod := runningPod("a")
	good := text(deletion(pod))
	replace := func(old, new string) string {
		if !strings.Contains(good, old) {
			t.Fatalf("%q is not in the review", old)
		}
		return strings.Replace(good, old, new, 1)
	}
	with := func(set func(*admissionv1.AdmissionRequest)) string { return text(deletion(pod, set)) }
	for name, c := range map[string]struct {
		body, query string
		code        int
		want        string
	}{
		"empty":   {"", "", 400, "decode the review: unexpected end of JSON input"},
		"no JSON": {"<html>", "", 400, "decode the review: invalid character '<'"},
		"cut short": {good[:len(good)/2], "", 400,
			"decode the review: unexpected end of JSON input"},
		"two reviews": {good + good, "", 400,
			"decode the review: invalid character '{' after top-level value"},
		"an array": {"[]", "", 400, "decode the review: json: cannot unmarshal array"},
		"null":     {"null", "", 400, `the review is a "" of version ""`},
		"a wrong type": {replace(`"uid":"review-1"`, `"uid":7`), "", 400,
			"decode the review: json: cannot unmarshal number"},
		"v1beta1": {replace("admission.k8s.io/v1", "admission.k8s.io/v1beta1"), "", 400,
			`a "AdmissionReview" of version "admission.k8s.io/v1beta1"; ` +
				`admission.k8s.io/v1 AdmissionReview is understood`},
		"another kind": {replace(`"kind":"AdmissionReview"`, `"kind":"TokenReview"`), "", 400,
			`the review is a "TokenReview"`},
		"no request": {`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}`, "", 400,
			"the review has no request"},
		"no UID": {replace(`"uid":"review-1"`, `"uid":""`), "", 400, "request.uid is empty"},
		"another resource": {replace(`"resource":"pods"`, `"resource":"nodes"`), "", 400,
			`"DELETE" of "/nodes/" is not for this webhook`},
		"another group": {with(func(r *admissionv1.AdmissionRequest) { r.Resource.Group = "apps" }),
			"", 400, `"DELETE" of "apps/pods/" is not`},
		"another operation": {replace(`"DELETE"`, `"UPDATE"`), "", 400, `"UPDATE" of "/pods/" is not`},
		"another subresource": {with(func(r *admissionv1.AdmissionRequest) { r.SubResource = "status" }),
			"", 400, `"DELETE" of "/pods/status" is not`},
		"a long resource": {with(func(r *admissionv1.AdmissionRequest) {
			r.Resource.Resource = strings.Repeat("x", 10_000)
		}), "", 400, `xxx" is not for this webhook`},
		"no old object": {with(func(r *admissionv1.AdmissionRequest) { r.OldObject.Raw = nil }),
			"", 400, "request.oldObject is empty"},
		"a null old object": {with(func(r *admissionv1.AdmissionRequest) {
			r.OldObject.Raw = []byte("null")
		}), "", 400, "request.oldObject is"},
		"an old object of another kind": {with(func(r *admissionv1.AdmissionRequest) {
			r.OldObject.Raw = []byte(`{"kind":"Node"}`)
		}), "", 400, `request.oldObject is a "Node", not a Pod`},
		"an old object that is none": {with(func(r *admissionv1.AdmissionRequest) {
			r.OldObject.Raw = []byte(`"pod"`)
		}), "", 400, "decode request.oldObject: json: cannot unmarshal string"},
		"an old object of a wrong type": {with(func(r *admissionv1.AdmissionRequest) {
			r.OldObject.Raw = []byte(`{"kind":"Pod","spec":7}`)
		}), "", 400, "decode request.oldObject: json: cannot unmarshal number"},
		"a time that is none": {with(func(r *admissionv1.AdmissionRequest) {
			r.OldObject.Raw = []byte(`{"kind":"Pod","metadata":{"uid":"u","deletionTimestamp":"soon"}}`)
		}), "", 400, `decode the review: parsing time "soon"`},
		"deep": {replace(`"oldObject":{`, `"oldObject":{"deep":`+strings.Repeat("[", 100_000)+strings.Repeat("]",
			100_000)+","), "", 400, "exceeded max depth"},
		"a pod without UID": {with(func(r *admissionv1.AdmissionRequest) {
			r.OldObject.Raw = []byte(`{"kind":"Pod","metadata":{"name":"a"}}`)
		}), "", 400, "request.oldObject.metadata.uid is empty"},
		"a pod without name": {with(func(r *admissionv1.AdmissionRequest) {
			r.OldObject.Raw = []byte(`{"kind":"Pod","metadata":{"uid":"u","namespace":"shop"}}`)
		}), "", 400, `names no pod: namespace "shop", name ""`},
		"options of a wrong type": {text(deletion(pod, options(`{"gracePeriodSeconds":"none"}`))), "", 400,
			"decode request.options: json: cannot unmarshal string"},
		"an eviction of a pod": {text(eviction(pod, "policy/v1", "", func(r *admissionv1.AdmissionRequest) {
			r.Object.Raw = []byte(`{"kind":"Pod"}`)
		})), "", 400, `request.object is a "Pod", not an Eviction`},
		"an eviction without object": {text(eviction(pod, "policy/v1", "", func(r *admissionv1.AdmissionRequest) {
			r.Object.Raw = nil
		})), "", 400, "request.object is empty"},
		"an eviction's wrong options": {text(eviction(pod, "policy/v1", `{"dryRun":"All"}`)), "", 400,
			"decode request.object: json: cannot unmarshal string"},
		"an eviction without a name": {text(eviction(pod, "policy/v1", "", func(r *admissionv1.AdmissionRequest) {
			r.Name = ""
			r.Object.Raw = []byte(`{"kind":"Eviction"}`)
		})), "", 400, "the review names no pod"},
		"timeout without unit": {good, "?timeout=5", 400, `timeout "5" in the URL is not a positive duration`},
		"timeout zero":         {good, "?timeout=0s", 400, `timeout "0s" in the URL`},
		"timeout negative":     {good, "?timeout=-1s", 400, `timeout "-1s" in the URL`},
		"timeout in words":     {good, "?timeout=soon", 400, `timeout "soon" in the URL`},
		"larger than 3 MiB": {good[:len(good)-1] + strings.Repeat(" ", maxReview-len(good)+1) + "}", "", 413,
			"the review is larger than 3145728 bytes"},
		"endless": {strings.Repeat("[", maxReview+1), "", 413, "the review is larger than 3145728 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			got := w.post(c.body, c.query)
			if got.Code != c.code || !strings.Contains(got.Body.String(), c.want) {
				t.Errorf("%d %.300s, want %d %s", got.Code, got.Body, c.code, c.want)
			}
			if got.Body.Len() > 1000 {
				t.Errorf("the refusal is %d bytes long", got.Body.Len())
			}
			w.unchanged("malformed " + http.StatusText(c.code))
		})
	}
}

// unchanged fails if the ledger was called, an Event written or a deletion counted.
func (w *world) unchanged(what string) {
	w.t.Helper()
	if len(w.ledger.calls) != 0 || len(w.events) != 0 {
		w.t.Errorf("%s: calls %q, events %v", what, w.ledger.calls, w.events)
	}
	for _, series := range w.counted() {
		if !strings.HasPrefix(series, "malformed ") || !strings.HasSuffix(series, " 1") {
			w.t.Errorf("%s: counted as %q", what, series)
		}
	}
}

func TestReviewsComeByPostAsJSON(t *testing.T) {
	body := text(deletion(runningPod("a")))
	for name, c := range map[string]struct {
		method, contentType string
		code                int
		want                string
	}{
		"GET":              {http.MethodGet, "application/json", 405, "method GET: reviews come by POST"},
		"PUT":              {http.MethodPut, "application/json", 405, "method PUT"},
		"no content type":  {http.MethodPost, "", 415, `content type "": an AdmissionReview comes as application/json`},
		"protobuf":         {http.MethodPost, "application/vnd.kubernetes.protobuf", 415, "vnd.kubernetes.protobuf"},
		"a form of a page": {http.MethodPost, "text/plain", 415, `content type "text/plain"`},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			r := httptest.NewRequest(c.method, "/v1/admit", strings.NewReader(body))
			r.Header.Set("Content-Type", c.contentType)
			got := httptest.NewRecorder()
			w.ServeHTTP(got, r)
			if got.Code != c.code || !strings.Contains(got.Body.String(), c.want) {
				t.Errorf("%d %s, want %d %s", got.Code, got.Body, c.code, c.want)
			}
			w.unchanged(name)
		})
	}
}

// A body that breaks off is the caller's fault too.
func TestABodyThatCannotBeRead(t *testing.T) {
	r := httptest.NewRequest(http.MethodPost, "/v1/admit", io.MultiReader(strings.NewReader("{"), broken{}))
	r.Header.Set("Content-Type", "application/json")
	var m serve.Refusal
	if _, err := read(nil, r); !errors.As(err, &m) || m.Code != 400 ||
		!strings.Contains(m.Text, "read the review: reset") {
		t.Errorf("%v", err)
	}
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, errors.New("reset") }

func (w *world) read(review *admissionv1.AdmissionReview, query string) *request {
	w.t.Helper()
	r := httptest.NewRequest(http.MethodPost, "/v1/admit"+query, strings.NewReader(text(review)))
	r.Header.Set("Content-Type", "application/json")
	q, err := read(nil, r)
	if err != nil {
		w.t.Fatal(err)
	}
	return q
}

func TestReadDeletion(t *testing.T) {
	w := newWorld(t)
	q := w.read(deletion(w.a, by("bob")), "?timeout=3s")
	if q.operation != Delete || q.namespace != "shop" || q.name != "a" || q.pod.UID != "uid-a" || q.collection ||
		q.dryRun || q.grace != nil ||
		q.username != "bob" || q.timeout != 3*time.Second || q.uid != "review-1" {
		t.Errorf("%+v", q)
	}
	q = w.read(deletion(w.a, options(`{"gracePeriodSeconds":0}`)), "")
	if q.grace == nil || *q.grace != 0 || q.timeout != 0 {
		t.Errorf("%+v", q)
	}
	q = w.read(deletion(w.a, options(`{"dryRun":["All"]}`)), "")
	if !q.dryRun {
		t.Error("the options' dry run is lost")
	}
	yes := true
	q = w.read(deletion(w.a, func(r *admissionv1.AdmissionRequest) { r.DryRun, r.Options.Raw = &yes, nil }), "")
	if !q.dryRun {
		t.Error("the request's dry run is lost")
	}
}

// A DELETECOLLECTION has no name in the request: only the object knows it.
func TestReadDeleteCollection(t *testing.T) {
	w := newWorld(t)
	q := w.read(deletion(w.a, func(r *admissionv1.AdmissionRequest) { r.Name = "" }), "")
	if !q.collection || q.name != "a" || q.namespace != "shop" {
		t.Errorf("%+v", q)
	}
}

func TestReadEviction(t *testing.T) {
	w := newWorld(t)
	for _, version := range []string{"policy/v1", "policy/v1beta1"} {
		q := w.read(eviction(w.a, version, ""), "")
		if q.operation != Evict || q.name != "a" || q.namespace != "shop" || q.pod != nil || q.dryRun ||
			q.grace != nil {
			t.Errorf("%s: %+v", version, q)
		}
		q = w.read(eviction(w.a, version, `{"dryRun":["All"],"gracePeriodSeconds":0}`), "")
		if !q.dryRun || q.grace == nil || *q.grace != 0 {
			t.Errorf("%s: %+v", version, q)
		}
		q = w.read(eviction(w.a, version, "", func(r *admissionv1.AdmissionRequest) { r.Name = "" }), "")
		if q.name != "a" {
			t.Errorf("%s: the name is %q", version, q.name)
		}
	}
}

// Whatever is posted: it is understood, or refused as the caller's fault.
func FuzzRead(f *testing.F) {
	pod := runningPod("a")
	pod.DeletionTimestamp = &metav1.Time{Time: time.Unix(1e9, 0)}
	f.Add(text(deletion(pod)), "5s")
	f.Add(text(deletion(pod, options(`{"gracePeriodSeconds":0,"dryRun":["All"]}`))), "")
	f.Add(text(eviction(pod, "policy/v1", `{"dryRun":["All"]}`)), "1h")
	f.Add(text(eviction(pod, "policy/v1beta1", "")), "-1s")
	f.Add("null", "9223372036854775807ns")
	f.Add(`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"oldObject":`+strings.Repeat("[",
		10_001), "5s")
	f.Add(strings.Replace(text(deletion(pod)), `"oldObject":{`, `"oldObject":{"KIND":"Pod","metadata":{"UID":"x"},`, 1),
		"5s")
	f.Fuzz(func(t *testing.T, body, timeout string) {
		r := httptest.NewRequest(http.MethodPost, "/v1/admit", strings.NewReader(body))
		r.URL.RawQuery = "timeout=" + timeout
		r.Header.Set("Content-Type", "application/json")
		q, err := read(nil, r)
		var m serve.Refusal
		switch {
		case err != nil && (!errors.As(err, &m) || m.Code < 400 || m.Code > 499 || m.Text == ""):
			t.Errorf("not the caller's fault: %v", err)
		case err == nil && (q.uid == "" || q.namespace == "" || q.name == "" || q.timeout < 0 ||
			q.operation == Delete && (q.pod == nil || q.pod.UID == "")):
			t.Errorf("understood as %+v", q)
		}
	})
}

// The API server may ask about a collection before it knows what is in it. Its pods follow, one by
// one.
func TestACollectionWithoutObjectIsAnUnknownPod(t *testing.T) {
	w := newWorld(t)
	w.Cluster.Live = &reader{broken: "*v1.Pod"} // must not be asked for a pod without name
	got := w.ask(deletion(w.a, func(r *admissionv1.AdmissionRequest) { r.Name, r.OldObject.Raw = "", nil }))
	if want := []string{"delete allow UnknownPod 1"}; !got.Allowed || !slices.Equal(w.counted(), want) ||
		len(w.ledger.calls) != 0 {
		t.Errorf("%+v, counted %q, want %q; calls %q", got, w.counted(), want, w.ledger.calls)
	}
}
