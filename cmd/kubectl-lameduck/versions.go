package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/internal/version"
)

// versionList is the output of version.
type versionList struct {
	metav1.TypeMeta `json:",inline"`
	Items           []component `json:"items"`
	// Unlisted is how many further agents coordinators know and do not list.
	Unlisted int `json:"unlisted,omitempty"`
}

// component is how many programs of a kind are of a version.
type component struct {
	// Component is kubectl-lameduck, coordinator or agent.
	Component string `json:"component"`
	// Version is the version and the commit. Empty: the program has not sent it.
	Version string `json:"version"`
	Count   int    `json:"count"`
}

// versions prints the version of this program, of the coordinators that answer, and of the agents
// that are connected to these. It returns an error if no coordinator answers.
func versions(ctx context.Context, o options, kube kubernetes.Interface, out, stderr io.Writer) error {
	var views []answer[api.View]
	all, err := find(ctx, o, kube)
	if err == nil {
		defer all.close()
		views, err = ask[api.View](ctx, o, all, api.ViewPath)
	}
	is := versionsOf(views)
	if err == nil {
		complain(views, stderr)
	}
	if done, bad := encode(o, is, out); bad != nil || done {
		return cmp.Or(bad, err)
	}
	var rows [][]string
	differ := false
	for _, c := range is.Items {
		rows = append(rows, []string{c.Component, count(c.Count), c.Version})
		differ = differ || c.Version != "" && c.Version != is.Items[0].Version
	}
	table(out, "COMPONENT COUNT VERSION", rows)
	if is.Unlisted > 0 {
		fmt.Fprintf(out, "Coordinators do not list %d more agents.\n", is.Unlisted)
	}
	if differ {
		fmt.Fprintln(out, "The versions differ. Install coordinators, agents and this plugin of one version.")
	}
	return err
}

// versionsOf returns the version of this program and those in the answers of coordinators.
func versionsOf(views []answer[api.View]) versionList {
	is := versionList{TypeMeta: kind("VersionList")}
	add := func(name, version string) {
		of := func(c component) bool { return c.Component == name && c.Version == version }
		if i := slices.IndexFunc(is.Items, of); i >= 0 {
			is.Items[i].Count++
		} else {
			is.Items = append(is.Items, component{name, version, 1})
		}
	}
	add("kubectl-lameduck", version.Build())
	for _, a := range views {
		if a.err == nil {
			add("coordinator", a.said.Replica.Version)
		}
	}
	w := merge(views)
	is.Unlisted = w.MoreAgents
	for _, a := range w.Agents {
		if len(a.ConnectedTo) > 0 {
			add("agent", a.Version)
		}
	}
	return is
}
