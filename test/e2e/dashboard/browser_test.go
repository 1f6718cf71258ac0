// Package dashboard tests the live page in a real Chromium, as an operator sees it.
package dashboard

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
)

func TestMain(m *testing.M) { cluster.Main(m) }

const (
	// most is how long anything may take that must happen on the page, where a machine that is busy
	// with other things starts pods meanwhile, or Chromium.
	most        = time.Minute
	wide, phone = 1200, 390
)

// browser is one tab of a Chromium of its own.
type browser struct {
	t   *testing.T
	ctx context.Context

	mu sync.Mutex
	// said is what the page wrote to the console that is not right. Pages that lose their
	// connection on purpose say so with quiet.
	said  []string
	quiet bool
}

// start starts Chromium. Where there is none, the test is skipped or fails: see [cluster.Missing].
func start(t *testing.T) *browser {
	t.Helper()
	path := ""
	for _, name := range []string{"chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"} {
		if found, err := exec.LookPath(name); err == nil {
			path = found
			break
		}
	}
	if path == "" {
		cluster.Missing(t, "chromium", "make chromium, or apt-get install chromium-headless-shell")
	}
	// Inside the test's namespaces Chromium cannot make a sandbox of its own. It sees nothing but
	// our page.
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path), chromedp.NoSandbox,
		chromedp.IgnoreCertErrors, chromedp.UserDataDir(t.TempDir()),
		chromedp.WindowSize(wide, 900), chromedp.Flag("disable-dev-shm-usage", true),
		chromedp.WSURLReadTimeout(time.Minute))
	allocator, endAllocator := chromedp.NewExecAllocator(context.Background(), options...)
	ctx, end := chromedp.NewContext(allocator)
	b := &browser{t: t, ctx: ctx}
	messages := chromedp.Console(ctx)
	var reading sync.WaitGroup
	reading.Go(func() {
		for m, err := range messages {
			if err != nil {
				return
			}
			b.mu.Lock()
			if m.IsException() || m.Type == "error" || m.Type == "warning" {
				if !(b.quiet && m.Source == "network") {
					b.said = append(b.said, m.String())
				}
			}
			b.mu.Unlock()
		}
	})
	t.Cleanup(func() {
		end()
		endAllocator()
		reading.Wait()
		// What Content-Security-Policy forbids, what was not found, what was not caught: a person
		// would not see it, but something is missing.
		for _, text := range b.said {
			t.Errorf("the page's console: %s", text)
		}
	})
	return b
}

func (b *browser) do(steps ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, 30*time.Second)
	defer cancel()
	if err := chromedp.Do(ctx, steps...); err != nil {
		b.t.Fatal(err)
	}
}

// expectLoss says that requests of the page will fail.
func (b *browser) expectLoss() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.quiet = true
}

func (b *browser) open(url string) {
	b.t.Helper()
	b.do(chromedp.Navigate(url))
}

// of evaluates JavaScript.
func of[T any](b *browser, expression string) T {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, 30*time.Second)
	defer cancel()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression))
	if err != nil {
		b.t.Fatalf("%s: %v", expression, err)
	}
	return v
}

// text is what stands in an element, as a person reads it.
func (b *browser) text(selector string) string {
	b.t.Helper()
	return strings.Join(strings.Fields(of[string](b,
		fmt.Sprintf("((e) => e?.checkVisibility() ? e.innerText : '')(document.querySelector(%q))", selector))), " ")
}

// await waits until text stands in an element.
func (b *browser) await(selector, text string) {
	b.t.Helper()
	b.awaitThat(fmt.Sprintf("%q in %s", text, selector), func() bool {
		return strings.Contains(b.text(selector), text)
	})
}

func (b *browser) awaitThat(what string, is func() bool) {
	b.t.Helper()
	for end := time.Now().Add(most); !is(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			b.t.Fatalf("no %s within %s; the page says:\n%s", what, most, of[string](b, "document.body.innerText"))
		}
	}
}

// look sets the width and the colours.
func (b *browser) look(width int64, scheme string) {
	b.t.Helper()
	b.do(chromedp.EmulateViewport(width, 900, chromedp.EmulateScale(1)))
	if _, err := chromedp.Call(b.ctx, emulation.SetEmulatedMedia,
		emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{
			{Name: "prefers-color-scheme", Value: scheme}, {Name: "prefers-reduced-motion", Value: "reduce"},
		}}); err != nil {
		b.t.Fatal(err)
	}
}

// settled returns what is wrong with the page once it has drawn all for its width and colors: the
// plot is drawn after the rest.
func (b *browser) settled(wrong func() string) (last string) {
	b.t.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		if last = wrong(); last == "" || time.Now().After(end) {
			return last
		}
	}
}

// overflows reports what is wider than the window, so that operators would have to scroll sideways.
func (b *browser) overflows() string {
	return of[string](b,
		`document.documentElement.scrollWidth <= window.innerWidth ? '' : [...document.querySelectorAll('body *')]
		.filter((e) => e.getBoundingClientRect().right > window.innerWidth + 1 && !e.closest('pre, .hidden, thead')).map((e) => e.tagName + '.' + e.className + '#' + e.id).join(' ')`)
}

// axe loads axe-core into the page, from outside of its Content-Security-Policy.
func (b *browser) axe() {
	b.t.Helper()
	text, err := os.ReadFile(gatewaytest.LookPath(b.t, "axe"))
	if err != nil {
		b.t.Fatal(err)
	}
	of[bool](b, string(text)+"; true")
}

// violations are what axe-core finds wrong with the page: each rule with the first element.
func (b *browser) violations() string {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, 30*time.Second)
	defer cancel()
	found, err := chromedp.Run(ctx, chromedp.Evaluate[string](
		`axe.run().then((r) => r.violations.map((v) => v.id + ' at ' + v.nodes[0].html).join('; '))`,
		chromedp.EvalAwaitPromise))
	if err != nil {
		b.t.Fatal(err)
	}
	return found
}

// picture writes a screenshot into $LAMEDUCK_SCREENSHOTS, if that is set. Full: of the whole page.
func (b *browser) picture(name string, full bool) {
	b.t.Helper()
	take := chromedp.CaptureScreenshot()
	if full {
		take = chromedp.FullScreenshot(100)
	}
	b.write(name, take)
}

// pictureOf is picture of one element.
func (b *browser) pictureOf(name, selector string) {
	b.t.Helper()
	b.write(name, chromedp.Screenshot(selector))
}

func (b *browser) write(name string, take chromedp.Action[[]byte]) {
	b.t.Helper()
	dir := os.Getenv("LAMEDUCK_SCREENSHOTS")
	if dir == "" {
		return
	}
	png, err := chromedp.Run(b.ctx, take)
	if err != nil {
		b.t.Fatal(err)
	}
	if !bytes.HasPrefix(png, []byte("\x89PNG")) {
		b.t.Fatalf("the screenshot %s is no PNG", name)
	}
	if err := os.WriteFile(filepath.Join(dir, name+".png"), png, 0o644); err != nil {
		b.t.Fatal(err)
	}
}
