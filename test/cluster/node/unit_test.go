package node

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestExpand(t *testing.T) {
	values := map[string]string{"A": "1", "B": "$(A)"}
	for text, want := range map[string]string{
		"":             "",
		"$(A)":         "1",
		"x$(A)y$(A)":   "x1y1",
		"$(B)":         "$(A)", // not again
		"$(NONE)":      "$(NONE)",
		"$$(A)":        "$(A)",
		"$$$(A)":       "$1",
		"$A $":         "$A $",
		"$(A":          "$(A",
		"$$$$":         "$$",
		"$() $(A B) )": "$() $(A B) )",
	} {
		if got := expand(text, values); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

// An address must rest before another pod gets it, because clients may still connect to the
// previous pod.
func TestAddresses(t *testing.T) {
	now := time.Unix(0, 0)
	pods := netip.MustParsePrefix("10.244.1.0/29") // .2 to .6
	a := newAddresses(pods, time.Minute)
	var all []netip.Addr
	for range 5 {
		address, err := a.take(now, netip.Addr{})
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, address)
	}
	if all[0].String() != "10.244.1.2" || all[4].String() != "10.244.1.6" {
		t.Errorf("addresses %v", all)
	}
	a.free(now, all[3])
	a.free(now.Add(time.Second), all[1])
	if address, err := a.take(now.Add(59*time.Second), netip.Addr{}); err == nil {
		t.Errorf("%s has not rested", address)
	}
	if address, err := a.take(now.Add(time.Minute), netip.Addr{}); err != nil || address != all[3] {
		t.Errorf("got %s, %v, want %s", address, err, all[3])
	}
	// Forced, it counts as used, even twice.
	for range 2 {
		if address, err := a.take(now, all[1]); err != nil || address != all[1] {
			t.Errorf("got %s, %v, want %s", address, err, all[1])
		}
	}
	a.free(now, all[1])
	if address, err := a.take(now.Add(time.Hour), netip.Addr{}); err == nil {
		t.Errorf("%s is used", address)
	}

	b := newAddresses(pods, -1)
	first, _ := b.take(now, netip.Addr{})
	b.free(now, first)
	if address, err := b.take(now, netip.Addr{}); err != nil || address != first {
		t.Errorf("got %s, %v, want %s", address, err, first)
	}
}

// A reader must never see a mixture, and unchanged files must not look changed.
func TestReplaceFiles(t *testing.T) {
	dir := t.TempDir()
	read := func(name string) string {
		content, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return err.Error()
		}
		return string(content)
	}
	replace := func(files map[string]file) string {
		if err := replaceFiles(dir, files); err != nil {
			t.Fatal(err)
		}
		target, err := os.Readlink(filepath.Join(dir, "..data"))
		if err != nil {
			t.Fatal(err)
		}
		return target
	}
	first := replace(map[string]file{"a": {"1", 0o600}, "sub/b": {"2", 0o644}})
	if read("a") != "1" || read("sub/b") != "2" {
		t.Error(read("a"), read("sub/b"))
	}
	if again := replace(map[string]file{"a": {"1", 0o600}, "sub/b": {"2", 0o644}}); again != first {
		t.Error("replaced without need")
	}
	replace(map[string]file{"sub/b": {"3", 0o644}})
	if _, err := os.Lstat(filepath.Join(dir, "a")); err == nil || read("sub/b") != "3" {
		t.Error(read("a"), read("sub/b"))
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 3 {
		t.Errorf("left: %v", entries)
	}
}
