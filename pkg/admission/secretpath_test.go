package admission

import (
	"bytes"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	secretOne = "one-0123456789abcdef"
	secretTwo = "two-0123456789abcdef"
)

// secretPathWorld is a secret path with a file, in front of a handler that says "inside".
type secretPathWorld struct {
	*SecretPath
	t    *testing.T
	file string
	log  bytes.Buffer
	reg  *prometheus.Registry
}

func newDoor(t *testing.T, text string) *secretPathWorld {
	t.Helper()
	w := &secretPathWorld{t: t, file: filepath.Join(t.TempDir(), "secret"), reg: prometheus.NewRegistry()}
	w.write(text)
	var err error
	if w.SecretPath, err = OpenSecretPath(w.file,
		slog.New(slog.NewTextHandler(&w.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
		NewMetrics(w.reg)); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *secretPathWorld) write(text string) {
	w.t.Helper()
	// As the kubelet does: another file under the same name.
	if err := os.WriteFile(w.file+".new", []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
	if err := os.Rename(w.file+".new", w.file); err != nil {
		w.t.Fatal(err)
	}
}

// get asks for a path and returns the whole of the answer.
func (w *secretPathWorld) get(path string, body io.Reader) (code int, answer string) {
	inside := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "inside") })
	recorder := httptest.NewRecorder()
	w.Guard(inside, inside).ServeHTTP(recorder, httptest.NewRequest(http.MethodPost, path, body))
	response := recorder.Result()
	defer response.Body.Close()
	var all bytes.Buffer
	if err := response.Write(&all); err != nil {
		w.t.Fatal(err)
	}
	return recorder.Code, all.String()
}

func (w *secretPathWorld) opens(secret string) bool {
	code, _ := w.get(Path+secret, nil)
	return code == http.StatusOK
}

// unread fails the test when anybody reads it.
type unread struct{ t *testing.T }

func (u unread) Read([]byte) (int, error) {
	u.t.Error("the body of a stranger's call is read")
	return 0, io.EOF
}

// Rule 10: a client that can post a review could have pods excluded. A client without the path must
// not learn either whether there is one.
func TestDoorIsClosedToStrangers(t *testing.T) {
	w := newDoor(t, secretOne+"\n")
	if !w.opens(secretOne) {
		t.Fatal("closed to the secret")
	}
	_, unknown := w.get("/nothing", unread{t})
	strangers := []string{
		"/", "/v1", "/v1/admit", "/v1/admit/", "/v1/admit/" + secretTwo, "/v1/admit/" + secretOne + "/",
		"/v1/admit/" + secretOne + "/x", "/v1/admit/x/../" + secretOne,
		"/v1/admit/" + secretOne[1:], "/v1/admit/" + strings.ToUpper(secretOne), "/v1/admit/%20" + secretOne,
		"//v1/admit/" + secretOne,
		"/v1/admit?" + secretOne, "/" + secretOne, "/v2/admit/" + secretOne,
	}
	for _, path := range strangers {
		if code, answer := w.get(path, unread{t}); code != http.StatusNotFound || answer != unknown {
			t.Errorf("%s: %d %q, want %q", path, code, answer, unknown)
		}
	}
	// The same again with the secret as the query of the right path.
	if code, _ := w.get(Path+secretOne+"?timeout=5s", nil); code != http.StatusOK {
		t.Errorf("with a timeout: %d", code)
	}
	if counted := (&world{t: t, registry: w.reg}).counted(); len(counted) != 1 || counted[0] != "malformed 404 16" {
		t.Errorf("counted %q, want %d", counted, len(strangers)+1)
	}
	// A stranger who calls a thousand times does not fill the log, and what he tried is not in it.
	if n := strings.Count(w.log.String(), "\n"); n != 1 {
		t.Errorf("%d lines are logged:\n%s", n, &w.log)
	}
	for _, secret := range []string{secretOne, secretTwo} {
		if strings.Contains(w.log.String(), secret) {
			t.Errorf("the log has a secret: %s", &w.log)
		}
	}
}

// The files of replicas and the API server's configuration never change at one moment. Were there a
// gap, deletions would not wait in it.
func TestASecretThatIsChangedIsGoodForSomeTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newDoor(t, secretOne)
		done := make(chan error, 1)
		go func() { done <- w.Run(t.Context()) }()
		opens := func(when, secret string, want bool) {
			t.Helper()
			synctest.Wait()
			if got := w.opens(secret); got != want {
				t.Errorf("%s: %s opens %t", when, secret, got)
			}
		}
		check := func(when string, one, two bool) {
			t.Helper()
			opens(when, secretOne, one)
			opens(when, secretTwo, two)
		}
		check("at first", true, false)
		w.write(secretOne + "\n" + secretTwo)
		time.Sleep(secretEvery)
		check("both in the file", true, true)
		w.write(secretTwo)
		time.Sleep(secretEvery)
		// Calls with the former secret are many, and do not keep it good.
		for range int(FormerSecret/time.Second) - 1 {
			opens("before its time is over", secretOne, true)
			time.Sleep(time.Second)
		}
		opens("in its last second", secretOne, true)
		time.Sleep(time.Second)
		check("its time is over", false, true)
		w.write(secretOne)
		time.Sleep(secretEvery)
		opens("exchanged at once", secretTwo, true)
		opens("an API server uses the new one", secretOne, true)
		time.Sleep(handover - time.Second)
		opens("another API server has not learned of it", secretTwo, true)
		opens("more calls change nothing", secretOne, true)
		time.Sleep(time.Second)
		check("all must have learned of it", true, false)
		w.write("")
		time.Sleep(FormerSecret + time.Minute)
		check("the file is empty for long", true, false)
		if err := os.Remove(w.file); err != nil {
			t.Fatal(err)
		}
		time.Sleep(FormerSecret + time.Minute)
		check("the file is gone for long", true, false)
		if n := strings.Count(w.log.String(), "read admission secrets: "); n != 1 {
			t.Errorf("%d lines say that the file cannot be read:\n%s", n, &w.log)
		}
		w.write(secretTwo)
		time.Sleep(secretEvery)
		opens("there", secretTwo, true)
		w.write(secretOne)
		time.Sleep(secretEvery)
		opens("back", secretOne, true)
		w.write(secretTwo)
		time.Sleep(secretEvery)
		time.Sleep(FormerSecret)
		check("there again", false, true)
		if log := w.log.String(); strings.Contains(log, secretOne) || strings.Contains(log, secretTwo) {
			t.Errorf("the log has a secret:\n%s", log)
		}
	})
}

// A webhook without a secret must not start as one that everybody may call, and its error must say
// what to do, and not what was in the file.
func TestDoorNeedsASecret(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"empty":          {"", "the file is empty"},
		"blank":          {" \n\n\t\n", "the file is empty"},
		"short":          {secretOne + "\n" + secretTwo[:15], "line 2 has 15 characters"},
		"with a slash":   {"0123456789/0123456789", "line 1 has a character that is not"},
		"with a percent": {"%30123456789012345", "line 1 has a character that is not"},
		"with a blank":   {"0123456789 0123456789", "line 1 has a character that is not"},
		"of a book":      {strings.Repeat("x", maxSecret+1), "more than 4096"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "secret")
			if err := os.WriteFile(file, []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := OpenSecretPath(file, slog.New(slog.DiscardHandler), NewMetrics(prometheus.NewRegistry()))
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), file) ||
				!strings.Contains(err.Error(), "kubectl -n lameduck-system create secret") {
				t.Errorf("%v, want %q, the file and the way out", err, c.want)
			}
			if again := CheckSecretFile(file); again == nil || again.Error() != err.Error() {
				t.Errorf("the command line says %v", again)
			}
			if text := strings.TrimSpace(c.text); text != "" && strings.Contains(err.Error(), text) {
				t.Errorf("the error quotes the secret: %v", err)
			}
		})
	}
	if err := CheckSecretFile(filepath.Join(t.TempDir(), "none")); err == nil ||
		!strings.Contains(err.Error(), "kubectl") {
		t.Errorf("%v", err)
	}
}

// Each path leads to its own handler, and none without the secret.
func TestBothDoors(t *testing.T) {
	d := newDoor(t, secretOne)
	says := func(text string) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, text) })
	}
	both := d.Guard(says("deletions"), says("creations"))
	for path, want := range map[string]string{
		Path + secretOne: "deletions", MutatePath + secretOne: "creations",
		MutatePath + secretTwo: "404 page not found\n", MutatePath: "404 page not found\n",
		"/v1/" + secretOne:            "404 page not found\n",
		MutatePath + "x/" + secretOne: "404 page not found\n", MutatePath + secretOne + "/": "404 page not found\n",
		secretOne: "404 page not found\n",
	} {
		w := httptest.NewRecorder()
		request := httptest.NewRequest(http.MethodPost, "/", nil)
		request.URL.Path = path
		both.ServeHTTP(w, request)
		if w.Body.String() != want {
			t.Errorf("%s: %q, want %q", path, w.Body, want)
		}
	}
}
