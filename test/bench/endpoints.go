package main

import (
	"fmt"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/internal/endpoints"
)

// endpointsSuite measures what an event of an EndpointSlice costs.
func endpointsSuite() ([]Result, error) {
	return []Result{unchangedSlice(), oneOfTenThousand()}, nil
}

// made returns a slice of n endpoints of Service shop/web, all ready.
func made(name string, first, n int) *discovery.EndpointSlice {
	portName, number, yes, no := "http", int32(80), true, false
	s := &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: name, ResourceVersion: "1",
			Labels: map[string]string{discovery.LabelServiceName: "web"},
		},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: &portName, Port: &number}},
	}
	for i := first; i < first+n; i++ {
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{
			Addresses: []string{fmt.Sprintf("10.%d.%d.%d", i>>16&255, i>>8&255, i&255)},
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "shop", Name: "web-" + strconv.Itoa(i),
				UID: uid(i)},
			Conditions: discovery.EndpointConditions{Ready: &yes, Serving: &yes, Terminating: &no},
		})
	}
	return s
}

func uid(i int) types.UID {
	return types.UID(fmt.Sprintf("%08x-0000-4000-8000-%012x", i, i))
}

func follower() *endpoints.Index {
	x := endpoints.NewIndex()
	x.Follow(endpoints.Port{Service: types.NamespacedName{Namespace: "shop", Name: "web"}, Name: "http"})
	return x
}

// unchangedSlice is a resync: a slice of 100 endpoints comes again, newly decoded. The floor walks
// both versions in order and compares address, UID and conditions.
func unchangedSlice() Result {
	const events = 20_000
	one, other := made("web-1", 0, 100), made("web-1", 0, 100)
	x := follower()
	x.Apply(time.Now(), one)
	differ := 0
	r := ratio(func() time.Duration {
		began := time.Now()
		for range events / 2 {
			differ += len(x.Apply(began, other)) + len(x.Apply(began, one))
		}
		return time.Since(began)
	}, func() time.Duration {
		began := time.Now()
		for range events {
			for i := range one.Endpoints {
				a, b := &one.Endpoints[i], &other.Endpoints[i]
				if a.Addresses[0] != b.Addresses[0] || a.TargetRef.UID != b.TargetRef.UID ||
					*a.Conditions.Ready != *b.Conditions.Ready ||
					*a.Conditions.Terminating != *b.Conditions.Terminating {
					differ++
				}
			}
		}
		return time.Since(began)
	})
	if differ != 0 {
		panic("an unchanged slice has changed")
	}
	return Result{Name: "endpoints/unchanged-slice", Ratio: r, Goal: 3,
		Note: "100 endpoints again, over an ordered walk of both versions"}
}

// oneOfTenThousand is one endpoint that turns unready and ready again in a Service of 10,000 in 100
// slices, over the same in a Service of one slice of 100.
func oneOfTenThousand() Result {
	const events = 5_000
	run := func(n int) func() time.Duration {
		x := follower()
		for i := range n {
			x.Apply(time.Now(), made("web-"+strconv.Itoa(i), i*100, 100))
		}
		ready, unready := made("web-0", 0, 100), made("web-0", 0, 100)
		no := false
		unready.Endpoints[50].Conditions.Ready = &no
		return func() time.Duration {
			began := time.Now()
			for range events {
				if len(x.Apply(began, unready)) != 1 || len(x.Apply(began, ready)) != 1 {
					panic("a change was not told")
				}
			}
			return time.Since(began)
		}
	}
	return Result{Name: "endpoints/one-of-10000", Ratio: ratio(run(100), run(1)), Goal: 3,
		Note: "one endpoint changes among 10,000, over one among 100"}
}
