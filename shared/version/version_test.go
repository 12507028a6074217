package version

import (
	"errors"
	"strings"
	"testing"
)

func TestCompatible(t *testing.T) {
	for _, tc := range []struct {
		host, guest string
		upgrade     Side // "" when they work together
	}{
		{"0.1.0", "0.1.0", ""},
		{"0.1.0", "0.1.9", ""},
		{"v0.1.0", "0.1.0-dev", ""},
		{"0.1.0", "0.2.0", Host},
		{"0.3.0", "0.2.9", Guest},
		{"0.10.0", "0.9.0", Guest}, // numbers, not text
		{"1.0.0", "1.7.3", ""},
		{"1.7.3", "1.0.0", ""},
		{"1.0.0", "2.0.0", Host},
		{"2.0.0", "1.9.9", Guest},
		{"0.9.0", "1.0.0", Host},
		{"1.0.0", "0.9.0", Guest},
		{"", "0.1.0", ""}, // what does not parse must not lock anybody out
		{"devel", "1.0.0", ""},
		{"1.0", "2.0.0", ""},
		{"1.-1.0", "2.0.0", ""},
		{"1.0.0.0", "2.0.0", ""},
	} {
		err := Compatible(tc.host, tc.guest)
		if tc.upgrade == "" {
			if err != nil {
				t.Errorf("Compatible(%q, %q) = %v", tc.host, tc.guest, err)
			}
			continue
		}
		var m *MismatchError
		if !errors.As(err, &m) || m.Upgrade != tc.upgrade || m.HostVersion != tc.host || m.GuestVersion != tc.guest {
			t.Errorf("Compatible(%q, %q) = %v, want upgrade %s", tc.host, tc.guest, err, tc.upgrade)
		} else if !strings.HasSuffix(err.Error(), "upgrade the "+string(tc.upgrade)) {
			t.Errorf("the error does not say what to do: %v", err)
		}
	}
}

func TestInfo(t *testing.T) {
	i := Get()
	if i.Version != Version || !strings.HasPrefix(i.Go, "go1") || !strings.Contains(i.Platform, "/") || i.Platform == "/" {
		t.Errorf("Get() = %+v", i)
	}
	for want, i := range map[string]Info{
		"1.2.3 go1.26 linux/amd64":                {Version: "1.2.3", Go: "go1.26", Platform: "linux/amd64"},
		"1.2.3 (0123456789ab) go1.26 linux/amd64": {Version: "1.2.3", Revision: "0123456789abcdef", Go: "go1.26", Platform: "linux/amd64"},
		"1.2.3 (0123) go1.26 linux/amd64":         {Version: "1.2.3", Revision: "0123", Go: "go1.26", Platform: "linux/amd64"},
	} {
		if got := i.String(); got != want {
			t.Errorf("String() = %q, want %q", got, want)
		}
	}
}
