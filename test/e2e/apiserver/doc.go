// Package apiserver has no code, only tests: they pin what Lameduck relies on in the API server and
// in its clients, against a real control plane. Kubernetes documents little of this behavior, and
// most of it is known only from its source. All of it affects whether a pod is deleted before its
// gateways have stopped routing to it.
//
// All but TestMadeUpTokens do not test Lameduck. If one of them fails, a later Kubernetes behaves
// differently. The comment above the test names the part of Lameduck that relies on the old
// behavior. The facts, by the numbers that the comments use:
//
//   - F1: an eviction is reviewed as CREATE of pods/eviction and never as DELETE of pods; its dry
//     run has two places.
//   - F2: a pod that is written during its DELETE is reviewed again, in the same request.
//   - F3: a webhook is told by ?timeout= how long its answer is waited for; all calls for one
//     request share 34 s.
//   - F4: a denial of code 429 makes callers come back, depending on Retry-After.
//   - F8: DELETECOLLECTION is serial, stops at the first denial, and names pods only in oldObject.
//   - F9: a deletion that ends a pod at once is reviewed two or three times.
//   - F10: an eviction is reviewed before the PodDisruptionBudget is looked at.
//   - F11: an objectSelector sees the labels of the Eviction, not of the pod.
//   - F12: what one webhook allows another, or the caller, may still prevent.
//   - F13: tokens of service accounts name the key that they are signed with, and the API server
//     shows it. TestMadeUpTokens tests how Lameduck uses that.
//
// Seen in Kubernetes 1.36 with clients of 0.37.
package apiserver
