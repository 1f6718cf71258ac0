package certs

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/lameduck-io/lameduck/internal/signal"
)

const (
	// RotateAnnotation is an annotation of the Secret. Each change of its value asks for the next
	// set.
	RotateAnnotation = "lameduck.io/rotate"
	// CAKey is the key of the bundle in the ConfigMap.
	CAKey = "ca.crt"
	// stateKey is the key of the State in the Secret.
	stateKey = "state"
	// lookEvery is the interval at which everything is read again, also without an event of a
	// watch.
	lookEvery = time.Minute
	// retryEvery is the pause before a failed step is tried again.
	retryEvery = time.Second
	// lookPace and lookBurst bound the rate of all these steps.
	lookPace  = 500 * time.Millisecond
	lookBurst = 10
	// callTimeout bounds all API calls of one step.
	callTimeout = 10 * time.Second
	// otherCA is how long this replica leaves a different CA in the ConfigMap. Kubelets take up to
	// a minute and a half to update a mounted file, so another replica may have the new CA earlier.
	// Without this pause both would overwrite each other until then.
	otherCA = 3 * time.Minute
)

// Options of a [Keeper].
type Options struct {
	Kube kubernetes.Interface
	// Namespace has the Secret and the ConfigMap. Both must exist, so that replicas need no right
	// to create them.
	Namespace, Secret, ConfigMap string
	// WebhookConfiguration is the name of the ValidatingWebhookConfiguration, and of the
	// MutatingWebhookConfiguration if there is one. The Keeper changes every webhook in them.
	WebhookConfiguration string
	// Names are the DNS names and IP addresses of the serving certificate.
	Names []string
	Times Times
	// Bundle: the Keeper writes the CA into the webhook configurations and the ConfigMap. False: an
	// operator provides the certificates.
	Bundle bool
	// CA reads the CA of certificates that an operator provides. The Keeper writes it into the
	// ConfigMap, if there is one. It writes nothing if CA is nil or returns nothing, or if Bundle
	// is set.
	CA func() ([]byte, error)
	// AdmitPath and MutatePath are the parts of the webhooks' paths before the secret. Empty: an
	// operator provides the paths.
	AdmitPath, MutatePath string
	// Let is called with the secrets to accept, whenever they may have changed. May be nil.
	Let func(secrets []string)
	Log *slog.Logger
}

// Keeper renews the State in the Secret, and writes the CA and the paths that follow from it into
// the API server's other objects. Make it with New.
type Keeper struct {
	Options
	wake signal.Signal
	// pace limits the steps, because another client may write other values again and again.
	pace *rate.Limiter
	// serving are the certificates to serve: the current one first, then the next one if there is
	// one.
	serving atomic.Pointer[[]*tls.Certificate]
	trusted atomic.Pointer[[]byte]
	entries atomic.Int64 // as Entries returns
	// secret is the secret of the current set. A change of it is logged.
	secret string
	// last is the state after the last step, with since when its sets are known.
	last State
	// told is this replica's CA when the ConfigMap last had it. other is since when the ConfigMap
	// has had a different one.
	told  string
	other time.Time
}

// New returns a Keeper that has nothing to serve until it has run for a moment.
func New(o Options) *Keeper {
	k := &Keeper{Options: o, wake: signal.New(), pace: rate.NewLimiter(rate.Every(lookPace), lookBurst)}
	k.entries.Store(-1)
	return k
}

var errNone = errors.New("there is no certificate yet: the Secret could not be read or written")

// GetCertificate is for tls.Config. A client that asks for a name that only the next certificate
// has gets the next one. Otherwise a Service that an upgrade adds could not be called until the
// next set is current. A nil hello asks for no name.
func (k *Keeper) GetCertificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	all := k.serving.Load()
	if all == nil {
		return nil, errNone
	}
	for _, c := range *all {
		if hello != nil && c.Leaf.VerifyHostname(hello.ServerName) == nil {
			return c, nil
		}
	}
	return (*all)[0], nil
}

// Ready returns nil if there is a certificate to serve, and otherwise the reason why there is none.
func (k *Keeper) Ready() error {
	_, err := k.GetCertificate(nil)
	return err
}

// Trusted returns the CAs that may have signed the certificates of the replicas, as PEM. Nil: none
// is known yet.
func (k *Keeper) Trusted() []byte {
	if trusted := k.trusted.Load(); trusted != nil {
		return *trusted
	}
	return nil
}

// Entries returns how many webhooks the ValidatingWebhookConfiguration has: 0 if it does not exist.
// Negative: it was not read yet.
func (k *Keeper) Entries() int { return int(k.entries.Load()) }

// Run renews and publishes until ctx is done. It retries a step that fails, and continues to serve
// the present certificate.
func (k *Keeper) Run(ctx context.Context) error {
	var watches sync.WaitGroup
	defer watches.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	admission := k.Kube.AdmissionregistrationV1().RESTClient()
	k.watch(ctx, &watches, k.Kube.CoreV1().RESTClient(), "secrets", k.Namespace, k.Secret, &corev1.Secret{})
	if k.Bundle || k.CA != nil {
		k.watch(ctx, &watches, k.Kube.CoreV1().RESTClient(), "configmaps", k.Namespace, k.ConfigMap,
			&corev1.ConfigMap{})
	}
	k.watch(ctx, &watches, admission, "validatingwebhookconfigurations", "", k.WebhookConfiguration,
		&admissionv1.ValidatingWebhookConfiguration{})
	k.watch(ctx, &watches, admission, "mutatingwebhookconfigurations", "", k.WebhookConfiguration,
		&admissionv1.MutatingWebhookConfiguration{})
	failing, untold := false, false
	for {
		if k.pace.Wait(ctx) != nil {
			return nil
		}
		wait, err := k.look(ctx, time.Now())
		switch {
		case ctx.Err() != nil:
			return nil
		case apierrors.IsConflict(err):
			wait = 0 // another replica was first
		case err != nil:
			if !failing {
				k.Log.Error("renew certificates: the present certificate stays in use", "error", err)
			}
			wait = retryEvery
		case failing:
			k.Log.Info("certificates are renewed again")
		}
		failing = err != nil && !apierrors.IsConflict(err)
		// The CA for agents comes last, so that a failure of it does not delay the webhook
		// configurations.
		if err := k.tellCA(ctx); err != nil && !apierrors.IsConflict(err) && ctx.Err() == nil {
			if !untold {
				k.Log.Error("write the CA for agents: they have the former one, or none", "error", err)
			}
			untold, wait = true, min(wait, retryEvery)
		} else {
			untold = false
		}
		select {
		case <-ctx.Done():
			return nil
		case <-k.wake:
		case <-time.After(min(max(wait, 0), lookEvery)):
		}
	}
}

// watch wakes the keeper when one object changes.
func (k *Keeper) watch(ctx context.Context, running *sync.WaitGroup, client rest.Interface, resource, namespace,
	name string, of runtime.Object) {
	if r, ok := client.(*rest.RESTClient); ok && r == nil {
		return // of a fake, which cannot watch by field: it is looked at every minute
	}
	selector := fields.OneTermEqualSelector("metadata.name", name)
	_, controller := toolscache.NewInformerWithOptions(toolscache.InformerOptions{
		ListerWatcher: toolscache.NewListWatchFromClient(client, resource, namespace, selector),
		ObjectType:    of,
		Handler: toolscache.ResourceEventHandlerFuncs{
			AddFunc:    func(any) { k.wake.Raise() },
			UpdateFunc: func(any, any) { k.wake.Raise() },
			DeleteFunc: func(any) { k.wake.Raise() },
		},
	})
	running.Go(func() { controller.RunWithContext(ctx) })
}

// look reads the Secret and the other objects, takes at most one step, and writes the differences.
// It returns the time until the next step.
func (k *Keeper) look(ctx context.Context, now time.Time) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	secret, err := k.Kube.CoreV1().Secrets(k.Namespace).Get(ctx, k.Secret, metav1.GetOptions{})
	if err != nil {
		return 0, fmt.Errorf("read Secret %s/%s: %w", k.Namespace, k.Secret, err)
	}
	var state State
	if text := secret.Data[stateKey]; len(text) > 0 {
		if err := json.Unmarshal(text, &state); err != nil {
			k.Log.Error("read the Secret: making new certificates", "secret", k.Namespace+"/"+k.Secret,
				"error", err)
			state = State{}
		}
	}
	// This comes first, so that the stored certificate is served even if a later step fails.
	if state.Current != nil && state.Current.usable(now) {
		if err := k.use(state); err != nil {
			return 0, err
		}
	}
	known, err := k.publish(ctx, state, false)
	if err != nil {
		return 0, err
	}
	state.recall(k.last)
	next, changed, err := state.step(now, known, secret.Annotations[RotateAnnotation], k.Names, k.Times)
	if err != nil {
		return 0, err
	}
	if state.Current != nil && next.Former == nil && next.Current.Secret != state.Current.Secret {
		k.Log.Error("certificate in the Secret has expired or is damaged: calls fail until the API server has the new",
			"secret", k.Namespace+"/"+k.Secret)
	}
	if changed {
		text, err := json.Marshal(next)
		if err != nil {
			return 0, err
		}
		updated := secret.DeepCopy()
		updated.Data = map[string][]byte{stateKey: text}
		if _, err := k.Kube.CoreV1().Secrets(k.Namespace).Update(ctx, updated, metav1.UpdateOptions{}); err != nil {
			return 0, fmt.Errorf("write Secret %s/%s: %w", k.Namespace, k.Secret, err)
		}
	}
	k.last = next
	if err := k.use(next); err != nil {
		return 0, err
	}
	if changed || !known {
		if _, err := k.publish(ctx, next, true); err != nil {
			return 0, err
		}
		return 0, nil // once more: only what was read back is known
	}
	return next.wait(now, k.Times), nil
}

// use makes this replica serve the certificates of s and accept its secrets.
func (k *Keeper) use(s State) error {
	pair, err := s.Current.pair()
	if err != nil {
		return fmt.Errorf("certificate in Secret %s/%s: %w", k.Namespace, k.Secret, err)
	}
	if k.Let != nil {
		k.Let(s.Secrets())
	}
	trusted := s.Trusted()
	k.trusted.Store(&trusted)
	serving := []*tls.Certificate{pair}
	if s.Next != nil {
		if next, err := s.Next.pair(); err == nil { // a damaged one is replaced when its turn comes
			serving = append(serving, next)
		}
	}
	k.serving.Store(&serving)
	if k.secret != s.Current.Secret {
		k.secret = s.Current.Secret
		k.Log.Info("certificate changed", "serial", pair.Leaf.SerialNumber.Text(16),
			"until", pair.Leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	return nil
}

// publish reports whether the webhook configurations and the ConfigMap agreed with s. If write is
// set, it updates those that did not. An object that does not exist agrees: without a webhook
// configuration there are no calls.
func (k *Keeper) publish(ctx context.Context, s State, write bool) (known bool, err error) {
	if s.Current == nil {
		return false, nil
	}
	admission := k.Kube.AdmissionregistrationV1()
	validating, err := agree(ctx, "ValidatingWebhookConfiguration", k.WebhookConfiguration, write,
		admission.ValidatingWebhookConfigurations(), func(of *admissionv1.ValidatingWebhookConfiguration) bool {
			same := true
			for i := range of.Webhooks {
				same = k.direct(&of.Webhooks[i].ClientConfig, k.AdmitPath, s) && same
			}
			k.entries.Store(int64(len(of.Webhooks)))
			return same
		})
	switch {
	case apierrors.IsNotFound(err):
		k.entries.Store(0)
	case err != nil:
		return false, err
	}
	mutating, err := agree(ctx, "MutatingWebhookConfiguration", k.WebhookConfiguration, write,
		admission.MutatingWebhookConfigurations(), func(of *admissionv1.MutatingWebhookConfiguration) bool {
			same := true
			for i := range of.Webhooks {
				same = k.direct(&of.Webhooks[i].ClientConfig, k.MutatePath, s) && same
			}
			return same
		})
	if err != nil && !apierrors.IsNotFound(err) {
		return false, err
	}
	known = validating && mutating
	if !k.Bundle {
		return known, nil
	}
	bundle, err := k.tell(ctx, s.Trusted(), write)
	if apierrors.IsNotFound(err) {
		err = nil // agents find no CA, and the API server has to have it all the same
	}
	return known && bundle, err
}

// tell reports whether the ConfigMap held the CA. If it did not and write is set, tell writes it.
func (k *Keeper) tell(ctx context.Context, ca []byte, write bool) (same bool, err error) {
	return agree(ctx, "ConfigMap", k.ConfigMap, write, k.Kube.CoreV1().ConfigMaps(k.Namespace),
		func(of *corev1.ConfigMap) bool {
			same := of.Data[CAKey] == string(ca)
			of.Data = map[string]string{CAKey: string(ca)}
			return same
		})
}

// agree reads an object and calls set, which changes it and reports whether it was already correct.
// If it was not and write is set, agree writes it. An object that does not exist is correct.
func agree[T any](ctx context.Context, kind, name string, write bool, client interface {
	Get(ctx context.Context, name string, o metav1.GetOptions) (T, error)
	Update(ctx context.Context, object T, o metav1.UpdateOptions) (T, error)
}, set func(T) bool) (same bool, err error) {
	object, err := client.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return apierrors.IsNotFound(err), fmt.Errorf("read %s %s: %w", kind, name, err)
	}
	if same = set(object); same || !write {
		return same, nil
	}
	if _, err := client.Update(ctx, object, metav1.UpdateOptions{}); err != nil {
		return false, fmt.Errorf("write %s %s: %w", kind, name, err)
	}
	return false, nil
}

// tellCA writes the CA of certificates that an operator provides into the ConfigMap.
func (k *Keeper) tellCA(ctx context.Context) error {
	if k.Bundle || k.CA == nil {
		return nil
	}
	text, err := k.CA()
	if err != nil || len(text) == 0 {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	same, err := k.tell(ctx, text, false)
	switch {
	case apierrors.IsNotFound(err):
		return nil // agents know it otherwise
	case err != nil:
		return err
	case same:
		k.told, k.other = string(text), time.Time{}
		return nil
	case k.told == string(text) && k.other.IsZero():
		k.other = time.Now()
		return nil
	case k.told == string(text) && time.Since(k.other) < otherCA:
		return nil
	}
	if _, err := k.tell(ctx, text, true); err != nil {
		return err
	}
	k.told, k.other = string(text), time.Time{}
	k.Log.Info("CA for agents changed", "configMap", k.Namespace+"/"+k.ConfigMap)
	return nil
}

// direct sets the CA bundle and the path of c as s requires, and reports whether they were already
// so.
func (k *Keeper) direct(c *admissionv1.WebhookClientConfig, path string, s State) (same bool) {
	same = true
	if k.Bundle {
		trusted := s.Trusted()
		same = bytes.Equal(c.CABundle, trusted)
		c.CABundle = trusted
	}
	if path == "" {
		return same
	}
	path += s.Current.Secret
	switch {
	case c.Service != nil:
		same = same && c.Service.Path != nil && *c.Service.Path == path
		c.Service.Path = &path
	case c.URL != nil:
		u, err := url.Parse(*c.URL)
		if err != nil {
			return same // the API server has accepted it, so it can be read
		}
		same = same && u.Path == path
		u.Path = path
		text := u.String()
		c.URL = &text
	}
	return same
}
