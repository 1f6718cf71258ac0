package certs

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// short lets a rotation end within few looks.
var short = Times{RotateEvery: 2 * time.Hour, Overlap: 10 * time.Minute}

// keeperWith runs a keeper beside a fake API server with the given objects.
func keeperWith(t *testing.T, kube *fake.Clientset, change func(*Options)) (*Keeper, func() []string) {
	var let atomic.Pointer[[]string]
	let.Store(new([]string))
	o := Options{
		Kube: kube, Namespace: "system", Secret: "kept", ConfigMap: "ca", WebhookConfiguration: "lameduck",
		Names: names, Times: short,
		Bundle: true, AdmitPath: "/v1/admit/", MutatePath: "/v1/mutate/", Let: func(s []string) { let.Store(&s) },
		Log: slog.New(slog.DiscardHandler),
	}
	if change != nil {
		change(&o)
	}
	k := New(o)
	if k.Ready() == nil {
		t.Error("ready before anything was made")
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- k.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return k, func() []string { return *let.Load() }
}

func installed() []runtime.Object {
	meta := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "system", Name: name} }
	url := "https://10.0.0.1:9443"
	return []runtime.Object{
		&corev1.Secret{ObjectMeta: meta("kept")}, &corev1.ConfigMap{ObjectMeta: meta("ca")},
		&admissionv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "lameduck"},
			Webhooks: []admissionv1.ValidatingWebhook{
				{Name: "a",
					ClientConfig: admissionv1.WebhookClientConfig{
						Service: &admissionv1.ServiceReference{Namespace: "system", Name: "w"}}},
				{Name: "b", ClientConfig: admissionv1.WebhookClientConfig{URL: &url}},
			}},
	}
}

func webhooks(t *testing.T, kube *fake.Clientset) []admissionv1.ValidatingWebhook {
	t.Helper()
	got, err := kube.AdmissionregistrationV1().ValidatingWebhookConfigurations().Get(t.Context(),
		"lameduck", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return got.Webhooks
}

func TestEverythingIsWrittenAndKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kube := fake.NewClientset(installed()...)
		k, let := keeperWith(t, kube, nil)
		time.Sleep(5 * time.Second)
		if err := k.Ready(); err != nil {
			t.Fatal(err)
		}
		secret := let()[0]
		check := func(when string) {
			t.Helper()
			w := webhooks(t, kube)
			if *w[0].ClientConfig.Service.Path != "/v1/admit/"+secret ||
				*w[1].ClientConfig.URL != "https://10.0.0.1:9443/v1/admit/"+secret ||
				len(w[0].ClientConfig.CABundle) == 0 ||
				string(w[1].ClientConfig.CABundle) != string(w[0].ClientConfig.CABundle) {
				t.Errorf("%s: %+v", when, w)
			}
			m, err := kube.CoreV1().ConfigMaps("system").Get(t.Context(), "ca", metav1.GetOptions{})
			if err != nil || m.Data[CAKey] != string(w[0].ClientConfig.CABundle) {
				t.Errorf("%s: agents' CA %q, %v", when, m.Data, err)
			}
		}
		check("at first")
		if n := k.Entries(); n != 2 {
			t.Errorf("%d entries, want 2", n)
		}
		// Another client overwrites it; without watches that is seen within a minute.
		empty := installed()[2].(*admissionv1.ValidatingWebhookConfiguration)
		if _, err := kube.AdmissionregistrationV1().ValidatingWebhookConfigurations().Update(t.Context(), empty,
			metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * lookEvery)
		check("after a change")
		// Break glass, and back.
		if err := kube.AdmissionregistrationV1().ValidatingWebhookConfigurations().Delete(t.Context(),
			"lameduck", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * lookEvery)
		if n := k.Entries(); n != 0 {
			t.Errorf("%d entries after break glass", n)
		}
		if _, err := kube.AdmissionregistrationV1().ValidatingWebhookConfigurations().Create(t.Context(), empty,
			metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * lookEvery)
		check("after break glass")
		// Time goes by: another secret, one at a time, at the end one alone.
		time.Sleep(short.RotateEvery + 3*short.Overlap)
		if s := let(); len(s) != 1 || s[0] == secret {
			t.Errorf("after a rotation these are let in: %d", len(s))
		}
		secret = let()[0]
		check("after a rotation")
	})
}

// A call fails, is refused because another replica was first, or is carried out and its answer is
// lost: in the end all agree with what is in the Secret.
func TestCallsFail(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kube := fake.NewClientset(installed()...)
		random := rand.New(rand.NewPCG(1, 0))
		var faults atomic.Bool
		faults.Store(true)
		kube.PrependReactor("*", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
			if !faults.Load() {
				return false, nil, nil
			}
			n := random.IntN(10)
			switch update, ok := action.(clienttesting.UpdateAction); {
			case n == 0:
				return true, nil, errors.New("away")
			case ok && n < 4:
				return true, nil, apierrors.NewConflict(schema.GroupResource{}, "x", errors.New("another was first"))
			case ok && n < 7:
				if err := kube.Tracker().Update(update.GetResource(), update.GetObject(),
					update.GetNamespace()); err != nil {
					t.Error(err)
				}
				return true, nil, errors.New("the answer is lost")
			}
			return false, nil, nil
		})
		_, let := keeperWith(t, kube, nil)
		time.Sleep(short.RotateEvery + time.Hour)
		faults.Store(false)
		time.Sleep(2 * lookEvery)
		kept, err := kube.CoreV1().Secrets("system").Get(t.Context(), "kept", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var state State
		if err := json.Unmarshal(kept.Data["state"], &state); err != nil {
			t.Fatal(err)
		}
		if w := webhooks(t, kube); !slices.Equal(let(), state.Secrets()) ||
			*w[0].ClientConfig.Service.Path != "/v1/admit/"+state.Current.Secret ||
			string(w[0].ClientConfig.CABundle) != string(state.Trusted()) {
			t.Errorf("kept %q, let in %q, %+v", state.Secrets(), let(), w)
		}
		if state.Next != nil || state.Former != nil || time.Since(state.Current.Made) > 2*short.RotateEvery {
			t.Errorf("a rotation has not ended: %+v", state)
		}
	})
}

// The Secret is damaged or deleted: a damaged one is made again, a deleted one is an error and the
// certificate that is served stays.
func TestTheSecretIsDamagedOrGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		objects := installed()
		objects[0].(*corev1.Secret).Data = map[string][]byte{"state": []byte("nonsense")}
		kube := fake.NewClientset(objects...)
		k, let := keeperWith(t, kube, nil)
		time.Sleep(5 * time.Second)
		if err := k.Ready(); err != nil || len(let()) != 1 {
			t.Fatalf("%v, %q", err, let())
		}
		// A replica that starts while nothing can be written serves what the others serve.
		if err := kube.CoreV1().ConfigMaps("system").Delete(t.Context(), "ca", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		other, otherLet := keeperWith(t, kube, nil)
		time.Sleep(5 * time.Second)
		if err := other.Ready(); err != nil || !slices.Equal(let(), otherLet()) {
			t.Errorf("without the ConfigMap: %v", err)
		}
		former := let()[0]
		time.Sleep(short.RotateEvery + 3*short.Overlap)
		if let()[0] == former {
			t.Error("without the ConfigMap the certificates are not renewed")
		}
		if err := kube.CoreV1().Secrets("system").Delete(t.Context(), "kept", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		if err := k.Ready(); err != nil {
			t.Error(err)
		}
	})
}

// With cert-manager the CA is in a file, and agents find it where they find that of the replicas.
// Errors in it do not affect the path.
func TestAgentsAreToldTheCAOfAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kube := fake.NewClientset(installed()...)
		var file atomic.Pointer[string]
		_, let := keeperWith(t, kube, func(o *Options) {
			o.Bundle = false
			o.CA = func() ([]byte, error) {
				if text := file.Load(); text != nil {
					return []byte(*text), nil
				}
				return nil, errors.New("a disk fails")
			}
		})
		told := func() string {
			m, err := kube.CoreV1().ConfigMaps("system").Get(t.Context(), "ca", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			return m.Data[CAKey]
		}
		time.Sleep(5 * time.Second)
		if w := webhooks(t, kube); told() != "" || len(let()) != 1 ||
			*w[0].ClientConfig.Service.Path != "/v1/admit/"+let()[0] || len(w[0].ClientConfig.CABundle) > 0 {
			t.Errorf("without the file: told %q, %+v", told(), w)
		}
		for _, text := range []string{"first", "second"} {
			file.Store(&text)
			time.Sleep(2 * lookEvery)
			if told() != text {
				t.Errorf("told %q, want %q", told(), text)
			}
		}
		// An issuer that says none has not taken the former back.
		file.Store(new(string))
		time.Sleep(2 * lookEvery)
		if told() != "second" {
			t.Errorf("told %q, want what was known", told())
		}
		// The ConfigMap may be missing.
		if err := kube.CoreV1().ConfigMaps("system").Delete(t.Context(), "ca", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		third := "third"
		file.Store(&third)
		time.Sleep(short.RotateEvery + 3*short.Overlap)
		if w := webhooks(t, kube); *w[0].ClientConfig.Service.Path != "/v1/admit/"+let()[0] {
			t.Errorf("without the ConfigMap: %+v", w)
		}
	})
}

// The file of one replica changes a minute before that of another one. Without this they write over
// each other's CA for all that time, and agents that connect trust now the one and now the other.
func TestReplicasDoNotWriteOverEachOthersCA(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kube := fake.NewClientset(installed()...)
		written := []string{}
		kube.PrependReactor("update", "configmaps", func(action clienttesting.Action) (bool, runtime.Object, error) {
			written = append(written, action.(clienttesting.UpdateAction).GetObject().(*corev1.ConfigMap).Data[CAKey])
			return false, nil, nil
		})
		var files [3]atomic.Pointer[string]
		first, second := "first", "second"
		for i := range files {
			files[i].Store(&first)
			k, _ := keeperWith(t, kube, func(o *Options) {
				o.Bundle = false
				o.CA = func() ([]byte, error) { return []byte(*files[i].Load()), nil }
			})
			// A fake cannot watch.
			done := t.Context().Done()
			go func() {
				for {
					select {
					case <-done:
						return
					case <-time.After(time.Second):
						select {
						case k.wake <- struct{}{}:
						default:
						}
					}
				}
			}()
			time.Sleep(5 * time.Second)
		}
		for i := range files {
			files[i].Store(&second)
			time.Sleep(40 * time.Second)
		}
		synctest.Wait()
		if !slices.Equal(written, []string{"first", "second"}) {
			t.Errorf("written are %d: %q", len(written), written[:min(len(written), 10)])
		}
		// CAs that no replica has are removed from it.
		m, err := kube.CoreV1().ConfigMaps("system").Get(t.Context(), "ca", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		m.Data = nil
		if _, err := kube.CoreV1().ConfigMaps("system").Update(t.Context(), m, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(otherCA + time.Minute)
		synctest.Wait()
		if last := written[len(written)-1]; last != "second" || len(written) > 6 {
			t.Errorf("written are %q", written)
		}
	})
}

// With cert-manager the CA is cert-manager's, with an operator's secret the path is the operator's.
func TestWhatIsNotOursIsNotWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		objects := installed()
		objects[2].(*admissionv1.ValidatingWebhookConfiguration).Webhooks[0].ClientConfig.CABundle = []byte("theirs")
		kube := fake.NewClientset(slices.DeleteFunc(objects, func(o runtime.Object) bool {
			_, is := o.(*corev1.ConfigMap)
			return is
		})...)
		_, let := keeperWith(t, kube, func(o *Options) { o.Bundle = false })
		time.Sleep(5 * time.Second)
		w := webhooks(t, kube)
		if string(w[0].ClientConfig.CABundle) != "theirs" || *w[0].ClientConfig.Service.Path != "/v1/admit/"+let()[0] {
			t.Errorf("%+v", w)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		kube := fake.NewClientset(installed()...)
		keeperWith(t, kube, func(o *Options) { o.AdmitPath, o.MutatePath, o.Let = "", "", nil })
		time.Sleep(5 * time.Second)
		if w := webhooks(t, kube); len(w[0].ClientConfig.CABundle) == 0 || w[0].ClientConfig.Service.Path != nil ||
			*w[1].ClientConfig.URL != "https://10.0.0.1:9443" {
			t.Errorf("%+v", w)
		}
	})
}

// An upgrade that adds a Service asks for a name that the current certificate does not have. The
// set with that name becomes current only after the overlap, an hour by default; until then the API
// server could not call the new Service, and deletions would not wait.
func TestANameThatIsAddedIsServedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kube := fake.NewClientset(installed()...)
		set, err := newSet(time.Now(), []string{"old.system.svc"}, short)
		if err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(State{Current: set})
		if err != nil {
			t.Fatal(err)
		}
		secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "system", Name: "kept"},
			Data: map[string][]byte{stateKey: text}}
		if _, err := kube.CoreV1().Secrets("system").Update(t.Context(), secret, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		k, _ := keeperWith(t, kube, func(o *Options) { o.Names = []string{"*.system.svc"} })
		time.Sleep(5 * time.Second)
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(webhooks(t, kube)[0].ClientConfig.CABundle)
		for _, name := range []string{"old.system.svc", "new-0.system.svc", "new-1.system.svc"} {
			got, err := k.GetCertificate(&tls.ClientHelloInfo{ServerName: name})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := got.Leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: roots}); err != nil {
				t.Errorf("what is served for %s: %v", name, err)
			}
			if current := string(got.Certificate[0]) == string(mustPair(t,
				set).Certificate[0]); current != (name == "old.system.svc") {
				t.Errorf("for %s the current certificate is served: %v", name, current)
			}
		}
		if got, err := k.GetCertificate(nil); err != nil ||
			string(got.Certificate[0]) != string(mustPair(t, set).Certificate[0]) {
			t.Errorf("without a name another certificate than the current one is served (%v)", err)
		}
	})
}

func mustPair(t *testing.T, s *Set) *tls.Certificate {
	t.Helper()
	pair, err := s.pair()
	if err != nil {
		t.Fatal(err)
	}
	return pair
}
