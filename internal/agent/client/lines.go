package client

import (
	"bufio"
	"encoding/json"
	"fmt"

	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// lines reads the messages of a stream.
type lines struct{ *bufio.Reader }

// more reports whether bytes that arrived with the last message are still to be read.
func (l lines) more() bool { return l.Buffered() > 0 }

// next returns the next message. At the end of the stream the error is [io.EOF].
func (l lines) next() (m wire.Message, err error) {
	var line []byte
	for more := true; more; {
		var part []byte
		if part, more, err = l.ReadLine(); err != nil {
			return m, err
		}
		if line = append(line, part...); len(line) > maxLine {
			return m, bufio.ErrTooLong
		}
	}
	if err := json.Unmarshal(line, &m); err != nil {
		return m, fmt.Errorf("message %.200q: %w", line, err)
	}
	return m, nil
}
