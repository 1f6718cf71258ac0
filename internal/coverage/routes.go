package coverage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// route is an object by which gateways of one class route a Service.
type route struct{ kind, name, class string }

// byService is the index of routes by the Services that they refer to, as namespace/name.
const byService = "service"

// kinds are the kinds of routes that are read. Gateway comes before the kinds whose class it
// determines.
var (
	gatewayGroup = schema.GroupVersion{Group: "gateway.networking.k8s.io", Version: "v1"}
	ingressKind  = networkingv1.SchemeGroupVersion.WithKind("Ingress")
	gatewayKind  = gatewayGroup.WithKind("Gateway")
	kinds        = []schema.GroupVersionKind{ingressKind, gatewayKind, gatewayGroup.WithKind("HTTPRoute"),
		gatewayGroup.WithKind("GRPCRoute")}
)

// kindsEvery is the interval at which the API server is asked for kinds that it did not have
// before.
const kindsEvery = 5 * time.Second

// legacyClass is the annotation that held the class of an Ingress before spec.ingressClassName
// existed.
const legacyClass = "kubernetes.io/ingress.class"

// kind is a watched kind. It stays when its definition is removed: the API server deletes its
// objects first, and the watch continues once the definition is installed again.
type kind struct {
	schema.GroupVersionKind
	has func() bool
}

// list returns an empty list of objects of k.
func (k kind) list() client.ObjectList {
	if k.GroupVersionKind == ingressKind {
		return &networkingv1.IngressList{}
	}
	var list unstructured.UnstructuredList
	list.SetGroupVersionKind(k.GroupVersion().WithKind(k.Kind + "List"))
	return &list
}

// Watch adds to the cache each kind of route that the cluster has and that is not watched yet, and
// returns the names of these kinds. Call it again at intervals: the kinds of Gateway API may be
// installed at any time.
func (s *Source) Watch(ctx context.Context, known cache.Cache, mapper meta.RESTMapper) (names []string, err error) {
	for _, of := range kinds {
		if slices.ContainsFunc(s.watched(), func(k kind) bool { return k.GroupVersionKind == of }) {
			continue
		}
		if _, err := mapper.RESTMapping(of.GroupKind(), of.Version); meta.IsNoMatchError(err) {
			if of == gatewayKind {
				return names, nil
			}
			continue
		} else if err != nil {
			return names, fmt.Errorf("ask the API server whether it has %s: %w", of, err)
		}
		object, refersTo := client.Object(&networkingv1.Ingress{}), ofIngress
		if of != ingressKind {
			route := &unstructured.Unstructured{}
			route.SetGroupVersionKind(of)
			object, refersTo = route, ofRoute
		}
		if of != gatewayKind {
			if err := known.IndexField(ctx, object, byService, refersTo); err != nil {
				return names, fmt.Errorf("index %s: %w", of.Kind, err)
			}
		}
		informer, err := known.GetInformer(ctx, object, cache.BlockUntilSynced(false))
		if err != nil {
			return names, fmt.Errorf("watch %s: %w", of.Kind, err)
		}
		s.mu.Lock()
		s.kinds = append(s.kinds, kind{of, informer.HasSynced})
		s.mu.Unlock()
		names = append(names, of.Kind)
	}
	return names, nil
}

// Follow calls [Source.Watch] now and every kindsEvery, until ctx is done.
func (s *Source) Follow(ctx context.Context, known cache.Cache, mapper meta.RESTMapper, log *slog.Logger) error {
	ticker := time.NewTicker(kindsEvery)
	defer ticker.Stop()
	for {
		names, err := s.Watch(ctx, known, mapper)
		if err != nil {
			log.Warn("find out which kinds of routes the cluster has", "error", err)
		} else {
			s.asked.Store(true)
		}
		if len(names) > 0 {
			log.Info("routes are read from", "kinds", names)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// Asked reports whether the API server has said which kinds of routes the cluster has.
func (s *Source) Asked() bool { return s.asked.Load() }

// watched returns the kinds that are watched.
func (s *Source) watched() []kind {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.kinds
}

// ofIngress returns the Services that an Ingress refers to.
func ofIngress(object client.Object) (services []string) {
	ingress := object.(*networkingv1.Ingress)
	add := func(b *networkingv1.IngressBackend) {
		if b != nil && b.Service != nil {
			services = append(services, ingress.Namespace+"/"+b.Service.Name)
		}
	}
	add(ingress.Spec.DefaultBackend)
	for _, rule := range ingress.Spec.Rules {
		if rule.HTTP != nil {
			for i := range rule.HTTP.Paths {
				add(&rule.HTTP.Paths[i].Backend)
			}
		}
	}
	return services
}

// ofRoute returns the Services that a route of Gateway API refers to.
func ofRoute(object client.Object) (services []string) {
	content := object.(*unstructured.Unstructured).Object
	for _, rule := range items(content, "spec", "rules") {
		for _, backend := range items(rule, "backendRefs") {
			namespace, name := reference(backend, object.GetNamespace())
			if kind, _, _ := unstructured.NestedString(backend, "kind"); kind == "" || kind == "Service" {
				services = append(services, namespace+"/"+name)
			}
		}
	}
	return services
}

// items returns the objects of a list in content.
func items(content map[string]any, fields ...string) (objects []map[string]any) {
	list, _, _ := unstructured.NestedSlice(content, fields...)
	for _, one := range list {
		if object, ok := one.(map[string]any); ok {
			objects = append(objects, object)
		}
	}
	return objects
}

// reference returns the namespace and name in a reference of Gateway API. A reference without a
// namespace is to own, the namespace of the object that has it.
func reference(content map[string]any, own string) (namespace, name string) {
	if namespace, _, _ = unstructured.NestedString(content, "namespace"); namespace == "" {
		namespace = own
	}
	name, _, _ = unstructured.NestedString(content, "name")
	return namespace, name
}

// routesTo returns the routes that refer to a Service, one for each class, and the kinds of routes
// that could not be read.
func (s *Source) routesTo(ctx context.Context, service drain.Service) (routes []route, unread []string, errs error) {
	for _, of := range s.watched() {
		if !of.has() {
			if unread = append(unread, of.Kind); of.GroupVersionKind == gatewayKind {
				break // without Gateways the class of a route is not known
			}
			continue
		}
		if of.GroupVersionKind == gatewayKind {
			continue
		}
		list := of.list()
		if err := s.Reader.List(ctx, list, client.MatchingFields{byService: service.String()}); err != nil {
			errs = errors.Join(errs, fmt.Errorf("list %s of Service %s: %w", of.Kind, service, err))
			continue
		}
		_ = meta.EachListItem(list, func(object runtime.Object) error {
			of, ok := object.(client.Object)
			if !ok {
				return nil
			}
			classes, err := s.classesOf(ctx, of, service)
			errs = errors.Join(errs, err)
			kind := "Ingress"
			if route, ok := object.(*unstructured.Unstructured); ok {
				kind = route.GetKind()
			}
			for _, class := range classes {
				routes = append(routes, route{kind, fmt.Sprintf("%s %s/%s", kind, of.GetNamespace(), of.GetName()),
					class})
			}
			return nil
		})
	}
	// Of several routes of one class, the first by name is kept.
	slices.SortFunc(routes, func(a, b route) int {
		return cmp.Or(strings.Compare(a.class, b.class), strings.Compare(a.name, b.name))
	})
	return slices.CompactFunc(routes, func(a, b route) bool { return a.class == b.class }), unread, errs
}

// classesOf returns the classes of the gateways that serve a route to a Service.
func (s *Source) classesOf(ctx context.Context, object client.Object, service drain.Service) (classes []string,
	errs error) {
	if ingress, ok := object.(*networkingv1.Ingress); ok {
		if name := ingress.Spec.IngressClassName; name != nil {
			return []string{*name}, nil
		}
		return []string{ingress.Annotations[legacyClass]}, nil
	}
	of, ok := object.(*unstructured.Unstructured)
	if !ok || of.GetNamespace() != service.Namespace && !resolved(of) {
		return nil, nil
	}
	for _, parent := range items(of.Object, "spec", "parentRefs") {
		group, _, _ := unstructured.NestedString(parent, "group")
		kind, _, _ := unstructured.NestedString(parent, "kind")
		if kind != "" && kind != gatewayKind.Kind || group != "" && group != gatewayKind.Group {
			continue // a Service, of a mesh
		}
		namespace, name := reference(parent, of.GetNamespace())
		var gateway unstructured.Unstructured
		gateway.SetGroupVersionKind(gatewayKind)
		err := s.Reader.Get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, &gateway)
		if client.IgnoreNotFound(err) != nil {
			errs = errors.Join(errs, fmt.Errorf("read Gateway %s/%s: %w", namespace, name, err))
		}
		if err == nil {
			class, _, _ := unstructured.NestedString(gateway.Object, "spec", "gatewayClassName")
			classes = append(classes, class)
		}
	}
	return classes, errs
}

// resolved reports whether a gateway's controller has accepted the references of a route. Otherwise
// no ReferenceGrant may permit a reference to another namespace.
func resolved(of *unstructured.Unstructured) bool {
	for _, parent := range items(of.Object, "status", "parents") {
		for _, condition := range items(parent, "conditions") {
			if condition["type"] == "ResolvedRefs" && condition["status"] == "True" {
				return true
			}
		}
	}
	return false
}
