// Package rights compares the rights of a ServiceAccount, from the roles that are bound to it, with
// their use, from the API server's audit log. The difference shows rights that are granted and not
// used, and rights that are used and missing.
package rights

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// Account is a ServiceAccount.
type Account struct{ Namespace, Name string }

// Username is what the API server calls it.
func (a Account) Username() string { return "system:serviceaccount:" + a.Namespace + ":" + a.Name }

// Used reads from an audit log what an account has asked for, as "verb group/resource", and what of
// it was refused, with the object's namespace and name. A last line that is half written is passed
// over.
func Used(auditLog string, a Account) (used map[string]bool, refused []string, err error) {
	file, err := os.Open(auditLog)
	if err != nil {
		return nil, nil, err
	}
	defer file.Close()
	used = map[string]bool{}
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e struct {
			Verb           string
			User           struct{ Username string }
			ObjectRef      *struct{ APIGroup, Resource, Subresource, Namespace, Name string }
			ResponseStatus struct{ Code int }
		}
		if json.Unmarshal(lines.Bytes(), &e) != nil || e.User.Username != a.Username() || e.ObjectRef == nil {
			continue
		}
		resource := e.ObjectRef.Resource
		if e.ObjectRef.Subresource != "" {
			resource += "/" + e.ObjectRef.Subresource
		}
		right := e.Verb + " " + e.ObjectRef.APIGroup + "/" + resource
		used[right] = true
		if e.ResponseStatus.Code == 403 {
			refused = append(refused, right+" "+e.ObjectRef.Namespace+"/"+e.ObjectRef.Name)
		}
	}
	return used, refused, lines.Err()
}

// Granted reads from the API server what the roles allow that are bound to an account, as Used has
// it, sorted.
func Granted(ctx context.Context, kube kubernetes.Interface, a Account) ([]string, error) {
	var rules []rbacv1.PolicyRule
	mine := func(subjects []rbacv1.Subject) bool {
		return slices.ContainsFunc(subjects, func(s rbacv1.Subject) bool {
			return s.Kind == rbacv1.ServiceAccountKind && s.Namespace == a.Namespace && s.Name == a.Name
		})
	}
	add := func(in string, ref rbacv1.RoleRef) error {
		if ref.Kind == "ClusterRole" {
			role, err := kube.RbacV1().ClusterRoles().Get(ctx, ref.Name, metav1.GetOptions{})
			if err != nil {
				return fmt.Errorf("read a ClusterRole of %s: %w", a.Username(), err)
			}
			rules = append(rules, role.Rules...)
			return nil
		}
		role, err := kube.RbacV1().Roles(in).Get(ctx, ref.Name, metav1.GetOptions{})
		if err != nil {
			return fmt.Errorf("read a Role of %s: %w", a.Username(), err)
		}
		rules = append(rules, role.Rules...)
		return nil
	}
	everywhere, err := kube.RbacV1().ClusterRoleBindings().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list ClusterRoleBindings: %w", err)
	}
	for _, b := range everywhere.Items {
		if mine(b.Subjects) {
			if err := add("", b.RoleRef); err != nil {
				return nil, err
			}
		}
	}
	here, err := kube.RbacV1().RoleBindings("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list RoleBindings: %w", err)
	}
	for _, b := range here.Items {
		if mine(b.Subjects) {
			if err := add(b.Namespace, b.RoleRef); err != nil {
				return nil, err
			}
		}
	}
	all := map[string]bool{}
	for _, r := range rules {
		for _, group := range r.APIGroups {
			for _, resource := range r.Resources {
				for _, verb := range r.Verbs {
					all[verb+" "+group+"/"+resource] = true
				}
			}
		}
	}
	return slices.Sorted(maps.Keys(all)), nil
}

// Unused are the rights of granted that used has not. API servers that cannot begin a watch with
// what there is (before 1.32, or where that is switched off) are asked for a list first, so that
// the right to list counts as used where that to watch was.
func Unused(granted []string, used map[string]bool) []string {
	var all []string
	for _, right := range granted {
		verb, resource, _ := strings.Cut(right, " ")
		if !used[right] && (verb != "list" || !used["watch "+resource]) {
			all = append(all, right)
		}
	}
	return all
}
