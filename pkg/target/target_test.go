package target

import "testing"

func TestPrintable(t *testing.T) {
	for text, want := range map[string]string{
		"Gateway käse-网关: 3 of 4 (97 %)": "Gateway käse-网关: 3 of 4 (97 %)",
		"":                               "",
		"x\x1b]52;c;cm0K\a":              "x?]52;c;cm0K?",
		"one\r\ntwo\tthree":              "one??two?three",
		"\u009b2J":                       "?2J", // C1's CSI
		"\x9b2J":                         "?2J", // the same, not UTF-8
		"a\u202eb\u2066c\u200fd":         "a?b?c?d",
		"\u2028\ufeff":                   "??",
	} {
		if got := Printable(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
