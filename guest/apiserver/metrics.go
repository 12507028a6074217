package apiserver

import (
	"fmt"
	"net/http"
	"strings"

	"klimax/shared/api"
)

// metrics writes the status in Prometheus' text format.
func (s *server) metrics(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; version=0.0.4")
	_, _ = fmt.Fprint(w, metricsText(s.o.Backend.Status()))
}

func metricsText(st api.Status) string {
	var b strings.Builder
	head := func(name, kind, help string) {
		fmt.Fprintf(&b, "# HELP klimax_%s %s\n# TYPE klimax_%s %s\n", name, help, name, kind)
	}
	one := func(name, kind, help string, v float64) {
		head(name, kind, help)
		fmt.Fprintf(&b, "klimax_%s %g\n", name, v)
	}
	flag := func(ok bool) float64 {
		if ok {
			return 1
		}
		return 0
	}
	one("network_in_sync", "gauge", "1 while all rules are in the kernel as wanted.", flag(st.Network.InSync))
	one("network_repairs_total", "counter", "Changes to the rules since the agent started, the first not counted.", float64(st.Network.Repairs))
	one("network_last_repair_seconds", "gauge", "Time from the news to the rules being back, last repair.", st.Network.LastRepairMillis/1000)
	one("docker_running", "gauge", "1 while the Docker engine answers.", flag(st.Docker.Running))
	one("docker_restarts_total", "counter", "Restarts of the Docker engine seen.", float64(st.Docker.Restarts))
	head("rule_packets_total", "counter", "Packets that the rules of one purpose matched since they were put in place.")
	for _, r := range st.Network.Rules {
		fmt.Fprintf(&b, "klimax_rule_packets_total{rule=%q} %d\n", r.ID, r.Packets)
	}
	head("condition", "gauge", "1 for a condition that is True, 0 for False, -1 for Unknown.")
	for _, c := range st.Conditions {
		v := map[api.ConditionStatus]int{api.True: 1, api.False: 0, api.Unknown: -1}[c.Status]
		fmt.Fprintf(&b, "klimax_condition{type=%q,reason=%q} %d\n", c.Type, c.Reason, v)
	}
	return b.String()
}
