package client

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"

	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// lines reads the messages of a stream.
type lines struct {
	scanner *bufio.Scanner
}

func newLines(r io.Reader) *lines {
	s := bufio.NewScanner(r)
	s.Buffer(nil, maxLine)
	return &lines{s}
}

// next returns the next message. At the end of the stream it is [io.EOF].
func (l *lines) next() (wire.Message, error) {
	var m wire.Message
	if !l.scanner.Scan() {
		if err := l.scanner.Err(); err != nil {
			return m, err
		}
		return m, io.EOF
	}
	if err := json.Unmarshal(l.scanner.Bytes(), &m); err != nil {
		return m, fmt.Errorf("message %.200q: %w", l.scanner.Text(), err)
	}
	return m, nil
}
