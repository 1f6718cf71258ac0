package harness

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Prometheus runs Prometheus, a program, with a configuration until the test ends, and returns its
// URL when it is ready.
func Prometheus(t testing.TB, program, config string) (base string) {
	t.Helper()
	dir := t.TempDir()
	path := filepath.Join(dir, "prometheus.yml")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	listener.Close()
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "--config.file="+path, "--storage.tsdb.path="+filepath.Join(dir, "data"),
		"--web.listen-address="+address)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		log.Close()
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("Prometheus writes: %s", text[max(0, len(text)-2000):])
		}
	})
	base = "http://" + address
	Await(t, 30*time.Second, "Prometheus is ready", func() error {
		response, err := http.Get(base + "/-/ready")
		if err != nil {
			return err
		}
		response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("%s", response.Status)
		}
		return nil
	})
	return base
}

// Series returns the labels of the series of an expression that have had a value within the last
// minute, from the Prometheus at base.
func Series(t testing.TB, base, expr string) (with []map[string]string) {
	t.Helper()
	now := time.Now()
	query := url.Values{"query": {expr}, "start": {fmt.Sprint(now.Add(-time.Minute).Unix())},
		"end": {fmt.Sprint(now.Unix())}, "step": {"1"}}
	response, err := http.Get(base + "/api/v1/query_range?" + query.Encode())
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var answer struct {
		Error string
		Data  struct {
			Result []struct {
				Metric map[string]string
				Values [][2]any
			}
		}
	}
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil || answer.Error != "" {
		t.Fatalf("%s: %v %s", expr, err, answer.Error)
	}
	for _, r := range answer.Data.Result {
		for _, v := range r.Values {
			if v[1] != "NaN" {
				with = append(with, r.Metric)
				break
			}
		}
	}
	return with
}

// ScrapeConfig returns the jobs of the operations page, with another way to discover targets.
func ScrapeConfig(t testing.TB, discovery string) string {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(Repository, "docs", "operations.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, jobs, _ := strings.Cut(string(page), "```yaml\nscrape_configs:\n")
	jobs, _, _ = strings.Cut(jobs, "```")
	const plain = "kubernetes_sd_configs: [{role: pod}]"
	if strings.Count(jobs, plain) != 1 {
		t.Fatalf("not one %s in the scrape configuration of the operations page: %s", plain, jobs)
	}
	return strings.Replace(jobs, plain, discovery, 1)
}
