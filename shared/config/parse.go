package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"reflect"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// maxFileSize bounds what Parse looks at, in bytes: a configuration has some
// kilobytes, anything far beyond is a wrong file.
const maxFileSize = 1 << 20

// Keys whose values may be written in a second form.
const (
	keyAllowFrom       = "network.allowFrom"      // also single addresses
	keyClusterCIDRBase = "kind.clusterCIDRBase"   // also with /16
	keyBridge          = "network.kindBridgeCIDR" // named in messages
)

// Parse reads a configuration in YAML or JSON. What is absent or null gets its
// default. Unknown and repeated keys, aliases, and values of the wrong type are
// errors; the value is validated as by Validate. The error is a *Problems with
// all that is wrong with the file; name stands for the file in it.
func Parse(name string, data []byte) (Config, error) {
	d := decoder{file: name, lines: map[string]int{}, bad: map[string]bool{}}
	c := Default()
	if root := d.document(data); root != nil {
		d.value(root, reflect.ValueOf(&c).Elem(), "")
	}
	validate(c, func(key, format string, args ...any) {
		if !d.undecoded(key) {
			d.problem(d.line(key), key, format, args...)
		}
	})
	if err := d.problems.err(); err != nil {
		return Config{}, err
	}
	return c, nil
}

// decoder fills a Config from YAML nodes and collects what is wrong.
type decoder struct {
	file     string
	lines    map[string]int  // line of each key that the file has
	bad      map[string]bool // keys whose value could not be read
	keys     []string        // Keys, once they were asked for
	problems Problems
}

func (d *decoder) problem(line int, key, format string, args ...any) {
	d.problems.add(Problem{File: d.file, Line: line, Key: key, Message: fmt.Sprintf(format, args...)})
}

// wrong reports a value that cannot be read; validate is not asked about it.
func (d *decoder) wrong(n *yaml.Node, key, format string, args ...any) {
	d.bad[key] = true
	d.problem(n.Line, key, format, args...)
}

// undecoded reports whether the value of key, or one above it, was not read.
func (d *decoder) undecoded(key string) bool {
	for ; key != ""; key = parent(key) {
		if d.bad[key] {
			return true
		}
	}
	return d.bad[""]
}

// line returns the line of key, or of what encloses it, or 0.
func (d *decoder) line(key string) int {
	for ; key != ""; key = parent(key) {
		if l, ok := d.lines[key]; ok {
			return l
		}
	}
	return 0
}

// parent returns the key that encloses key, "" for one at the top.
func parent(key string) string { return key[:max(0, strings.LastIndexAny(key, ".["))] }

var yamlLine = regexp.MustCompile(`^yaml: line (\d+): `)

// document returns the node below the only document of data, nil when there
// is nothing to read (an empty file, or one that is no YAML).
func (d *decoder) document(data []byte) *yaml.Node {
	if len(data) > maxFileSize {
		d.problem(0, "", "is larger than %d bytes, which no configuration is", maxFileSize)
		return nil
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc, more yaml.Node
	err := dec.Decode(&doc)
	if err == nil {
		if err = dec.Decode(&more); err == nil {
			d.problem(more.Line, "", "a second YAML document begins here, there must be only one")
			return nil
		}
	}
	if !errors.Is(err, io.EOF) {
		message, line := err.Error(), 0
		if m := yamlLine.FindStringSubmatch(message); m != nil {
			line, _ = strconv.Atoi(m[1]) // digits by the pattern
			message = message[len(m[0]):]
		}
		d.problem(line, "", "is not valid YAML: %s", strings.TrimPrefix(message, "yaml: "))
		return nil
	}
	if doc.Kind != yaml.DocumentNode || len(doc.Content) != 1 {
		return nil
	}
	return doc.Content[0]
}

// value reads n into v, which has the default already.
func (d *decoder) value(n *yaml.Node, v reflect.Value, key string) {
	d.lines[key] = n.Line
	if n.Kind == yaml.AliasNode {
		d.wrong(n, key, "is an alias (*%s), write the value itself", n.Value)
		return
	}
	if n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" {
		if strings.HasSuffix(key, "]") {
			d.wrong(n, key, "is empty")
		}
		return
	}
	switch target := v.Addr().Interface().(type) {
	case *netip.Prefix:
		d.prefix(n, target, key)
	case *netip.Addr:
		d.address(n, target, key)
	case *string:
		if d.scalar(n, key, "!!str", "text") {
			*target = n.Value
		}
	case *int:
		if !d.scalar(n, key, "!!int", "a whole number") {
			return
		}
		i, err := strconv.Atoi(n.Value)
		if err != nil {
			d.wrong(n, key, "must be a whole number in decimal digits, but is %s", n.Value)
			return
		}
		*target = i
	case *bool:
		if d.scalar(n, key, "!!bool", "true or false") {
			*target = strings.EqualFold(n.Value, "true")
		}
	default:
		switch v.Kind() {
		case reflect.Struct:
			d.mapping(n, v, key)
		case reflect.Slice:
			d.sequence(n, v, key)
		}
	}
}

func (d *decoder) mapping(n *yaml.Node, v reflect.Value, key string) {
	if n.Kind != yaml.MappingNode {
		if key == "" {
			d.wrong(n, key, "the file must be a mapping (keys like network:), but is %s", describe(n))
		} else {
			d.wrong(n, key, "must be a mapping of keys, but is %s", describe(n))
		}
		return
	}
	fields := fieldsOf(v.Type())
	first := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, value := n.Content[i], n.Content[i+1]
		if k.Kind != yaml.ScalarNode {
			d.problem(k.Line, key, "has a key that is %s", describe(k))
			continue
		}
		name := join(key, k.Value)
		if line, again := first[k.Value]; again {
			d.problem(k.Line, name, "is there twice, first in line %d", line)
			continue
		}
		first[k.Value] = k.Line
		field, known := fields[k.Value]
		if !known {
			d.problems.add(Problem{File: d.file, Line: k.Line, Key: name, Message: "unknown key", Nearest: d.nearestKey(k.Value, key, v.Type())})
			continue
		}
		d.value(value, v.Field(field), name)
		d.lines[name] = k.Line
	}
}

func (d *decoder) sequence(n *yaml.Node, v reflect.Value, key string) {
	if n.Kind != yaml.SequenceNode {
		d.wrong(n, key, "must be a list, but is %s", describe(n))
		return
	}
	list := reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content))
	for i, item := range n.Content {
		d.value(item, list.Index(i), fmt.Sprintf("%s[%d]", key, i))
	}
	v.Set(list)
}

// scalar reports whether n is a scalar of the wanted kind, and a problem if not.
func (d *decoder) scalar(n *yaml.Node, key, tag, want string) bool {
	if n.Kind == yaml.ScalarNode && n.ShortTag() == tag {
		return true
	}
	hint := ""
	switch {
	case n.Kind != yaml.ScalarNode:
	case tag == "!!str":
		hint = fmt.Sprintf(", write it in quotes: %q", n.Value)
	case tag == "!!int" && n.ShortTag() == "!!str":
		if _, err := strconv.Atoi(n.Value); err == nil {
			hint = ", write it without quotes"
		}
	}
	d.wrong(n, key, "must be %s, but is %s%s", want, describe(n), hint)
	return false
}

func (d *decoder) prefix(n *yaml.Node, target *netip.Prefix, key string) {
	if !d.scalar(n, key, "!!str", "a network like 172.30.0.0/16") {
		return
	}
	bare := strings.HasPrefix(key, keyAllowFrom)
	if bare {
		if a, err := netip.ParseAddr(n.Value); err == nil && a.Zone() == "" {
			*target = netip.PrefixFrom(a, a.BitLen())
			return
		}
	}
	p, err := netip.ParsePrefix(n.Value)
	switch {
	case err == nil:
		*target = p
	case bare:
		d.wrong(n, key, "%q is neither an address like 192.168.64.1 nor a network like 192.168.64.0/24", n.Value)
	default:
		d.wrong(n, key, "%q is not a network like 172.30.0.0/16", n.Value)
	}
}

func (d *decoder) address(n *yaml.Node, target *netip.Addr, key string) {
	if !d.scalar(n, key, "!!str", "an address like 10.100.0.0") {
		return
	}
	text := n.Value
	if key == keyClusterCIDRBase {
		text = strings.TrimSuffix(text, "/16")
	}
	a, err := netip.ParseAddr(text)
	if err != nil || a.Zone() != "" {
		d.wrong(n, key, "%q is not an address", n.Value)
		return
	}
	*target = a
}

// describe names what a node is, for messages.
func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.AliasNode:
		return "an alias"
	}
	value := n.Value
	if len(value) > 40 {
		value = value[:40] + "…"
	}
	switch n.ShortTag() {
	case "!!str":
		return fmt.Sprintf("the text %q", value)
	case "!!int", "!!float":
		return "the number " + value
	case "!!bool":
		return value
	case "!!null":
		return "empty"
	}
	return fmt.Sprintf("%q", value)
}

// fieldsOf returns the index of each field of struct type t by its key.
func fieldsOf(t reflect.Type) map[string]int {
	fields := make(map[string]int, t.NumField())
	for i := range t.NumField() {
		fields[t.Field(i).Tag.Get("yaml")] = i
	}
	return fields
}

// Keys returns the full path of every key in the order of the types, with "[]"
// after each list of mappings: "vm.cpus", "clusters[].name".
func Keys() []string { return keysOf(reflect.TypeFor[Config](), "") }

func keysOf(t reflect.Type, prefix string) []string {
	var keys []string
	for i := range t.NumField() {
		key := join(prefix, t.Field(i).Tag.Get("yaml"))
		ft := t.Field(i).Type
		if ft.Kind() == reflect.Slice && isSection(ft.Elem()) {
			key, ft = key+"[]", ft.Elem()
		}
		keys = append(keys, key)
		if isSection(ft) {
			keys = append(keys, keysOf(ft, key)...)
		}
	}
	return keys
}

// isSection reports whether t is a struct with keys of its own.
func isSection(t reflect.Type) bool {
	return t.Kind() == reflect.Struct && t != reflect.TypeFor[netip.Addr]() && t != reflect.TypeFor[netip.Prefix]()
}

// nearestKey returns the full path of the known key that is most likely meant
// by the unknown key name within section (of type t): a sibling of a similar
// name, else a key of just that name in another section, else "".
func (d *decoder) nearestKey(name, section string, t reflect.Type) string {
	var siblings []string
	for i := range t.NumField() {
		siblings = append(siblings, t.Field(i).Tag.Get("yaml"))
	}
	if near := nearest(name, siblings); near != "" {
		return join(section, near)
	}
	if d.keys == nil {
		d.keys = Keys()
	}
	for _, key := range d.keys {
		if strings.EqualFold(key[strings.LastIndex(key, ".")+1:], name) {
			return key
		}
	}
	return ""
}

func join(prefix, key string) string {
	if prefix == "" {
		return key
	}
	return prefix + "." + key
}
