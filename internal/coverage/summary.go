package coverage

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// summaryEvery is how long a Summary is reused, because a large cluster has thousands of Services
// to read.
const summaryEvery = 10 * time.Second

// Summary is the coverage of all Services that have pods and are not in an excluded namespace.
type Summary struct {
	// At is when it was computed.
	At time.Time
	// Services counts them. Nil: they are not known yet.
	Services map[Class]int
	// Gaps are the consumers that are not waited for, in the order of the Services.
	Gaps []Consumer
}

// Class is how a Service is covered.
type Class struct {
	// State is that of its consumer with the worst one. A Service whose consumers could not be read
	// is [Possible].
	State State
	// Gates is at which gates its pods wait for an agent: one of [gates].
	Gates string
}

// gates are the values of Class.Gates: bit 0 of the index is the hold, where some agent directs a
// gateway of the Service. Bit 1 is the barrier, which all its pods have, and where some agent
// observes a gateway of the Service.
var gates = []string{"none", "hold", "barrier", "both"}

// Summary returns the coverage of all Services, as it was at most 10 s ago. With an error it
// returns the part that it could find.
func (s *Source) Summary(ctx context.Context) (Summary, error) {
	s.last.Lock()
	defer s.last.Unlock()
	if time.Since(s.last.At) >= summaryEvery {
		// A caller that gives up must not leave a part for the others.
		s.last.Summary, s.last.err = s.summarize(context.WithoutCancel(ctx))
	}
	return s.last.Summary, s.last.err
}

func (s *Source) summarize(ctx context.Context) (sum Summary, errs error) {
	sum.At = time.Now()
	if !s.Synced() {
		return sum, errors.New("Services and pods are not known yet")
	}
	var all corev1.ServiceList
	if err := s.Reader.List(ctx, &all); err != nil {
		return sum, fmt.Errorf("list Services: %w", err)
	}
	sum.Services = map[Class]int{}
	namespaces, read := map[string]labeled{}, gatewayPods{}
	for _, service := range all.Items {
		if len(service.Spec.Selector) == 0 || slices.Contains(s.Excluded, service.Namespace) {
			continue
		}
		pods, ok := namespaces[service.Namespace]
		if !ok {
			var err error
			if pods, err = s.podsOf(ctx, service.Namespace); err != nil {
				errs = errors.Join(errs, err)
			}
			namespaces[service.Namespace] = pods
		}
		selected := pods.selected(service.Spec.Selector)
		if len(selected) == 0 {
			continue
		}
		name := drain.Service{Namespace: service.Namespace, Name: service.Name}
		barrier := !slices.ContainsFunc(selected, func(p *corev1.Pod) bool { return !keys.Barred(p.Annotations) })
		is, err := s.of(ctx, name, barrier, read)
		errs = errors.Join(errs, err)
		state, at, services := Possible, 0, []drain.Service{name}
		if len(is.Consumers) > 0 && (err == nil || is.Consumers[0].State == Uncovered) {
			state = is.Consumers[0].State
		}
		if s.Asks(drain.AtHold, services) {
			at |= 1
		}
		if barrier && s.Asks(drain.AtBarrier, services) {
			at |= 2
		}
		sum.Services[Class{state, gates[at]}]++
		for _, c := range is.Consumers {
			if c.State == Uncovered {
				sum.Gaps = append(sum.Gaps, c)
			}
		}
	}
	slices.SortStableFunc(sum.Gaps, func(a, b Consumer) int {
		return strings.Compare(a.Service.String(), b.Service.String())
	})
	return sum, errs
}

// labeled are the pods of one namespace, by each of their labels: name and value.
type labeled map[[2]string][]*corev1.Pod

func (s *Source) podsOf(ctx context.Context, namespace string) (labeled, error) {
	var all corev1.PodList
	if err := s.Reader.List(ctx, &all, client.InNamespace(namespace)); err != nil {
		return nil, fmt.Errorf("list pods of namespace %s: %w", namespace, err)
	}
	pods := labeled{}
	for i := range all.Items {
		for name, value := range all.Items[i].Labels {
			pods[[2]string{name, value}] = append(pods[[2]string{name, value}], &all.Items[i])
		}
	}
	return pods, nil
}

// selected returns the pods that have all labels of a selector. It looks at those that have the
// rarest one, not at the whole namespace: a namespace may have thousands of Services.
func (l labeled) selected(selector map[string]string) (pods []*corev1.Pod) {
	first := true
	for name, value := range selector {
		if with := l[[2]string{name, value}]; first || len(with) < len(pods) {
			pods, first = with, false
		}
	}
	all := labels.SelectorFromSet(selector)
	return slices.DeleteFunc(slices.Clone(pods), func(p *corev1.Pod) bool { return !all.Matches(labels.Set(p.Labels)) })
}

var services = prometheus.NewDesc("lameduck_services",
	"Services that have pods, by the worst coverage among their consumers, and by the gates at which their pods "+
		"wait for an agent.", []string{"coverage", "gates"}, nil)

// Describe implements [prometheus.Collector].
func (s *Source) Describe(descs chan<- *prometheus.Desc) { descs <- services }

// Collect implements [prometheus.Collector]. There are no values before Services and pods are
// known.
func (s *Source) Collect(metrics chan<- prometheus.Metric) {
	sum, _ := s.Summary(context.Background()) // a Service that could not be read is Possible
	if sum.Services == nil {
		return
	}
	for _, state := range states {
		for _, at := range gates {
			metrics <- prometheus.MustNewConstMetric(services, prometheus.GaugeValue,
				float64(sum.Services[Class{state, at}]), string(state), at)
		}
	}
}
