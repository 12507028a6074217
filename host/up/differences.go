package up

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"

	"klimax/shared/config"
)

// mostDifferences is how many keys are named before "and N more keys".
const mostDifferences = 5

// differences names the keys in which two configurations differ, with both
// values, secrets hidden: "network.uplink: "" → "eth1"". A list that differs is
// named as a whole.
func differences(old, updated config.Config) []string {
	a, errA := flat(old.Redacted())
	b, errB := flat(updated.Redacted())
	if errA != nil || errB != nil {
		return nil // only a message is lost
	}
	var out []string
	for key, now := range b {
		if before := a[key]; !reflect.DeepEqual(before, now) {
			if short(before) == "" || short(now) == "" {
				out = append(out, key)
			} else {
				out = append(out, fmt.Sprintf("%s: %s → %s", key, short(before), short(now)))
			}
		}
	}
	slices.Sort(out)
	if more := len(out) - mostDifferences; more > 1 {
		out = append(out[:mostDifferences], fmt.Sprintf("and %d more keys", more))
	}
	return out
}

// short is a value for one line, empty for one that is too long for it.
func short(v any) string {
	const most = 40 // bytes
	b, err := json.Marshal(v)
	if err != nil || len(b) > most {
		return ""
	}
	return string(b)
}

// flat turns a configuration into a map from full key to value.
func flat(c config.Config) (map[string]any, error) {
	b, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	var tree map[string]any
	if err := json.Unmarshal(b, &tree); err != nil {
		return nil, err
	}
	out := map[string]any{}
	flatten("", tree, out)
	return out, nil
}

func flatten(prefix string, tree map[string]any, out map[string]any) {
	for k, v := range tree {
		if sub, ok := v.(map[string]any); ok {
			flatten(prefix+k+".", sub, out)
		} else {
			out[prefix+k] = v
		}
	}
}
