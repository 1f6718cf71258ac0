package dashboard

import (
	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// healthElsewhere is where there is more.
const healthElsewhere = "Each agent tells of all its targets at /v1/targets of its --metrics-address (:9101 if it " +
	"is not set otherwise)."

func healthOf(of coordinator.TargetHealth) api.TargetHealth {
	h := api.TargetHealth{
		Reported: of.Agents > 0, Where: healthElsewhere, Agents: of.Agents, Untold: of.Untold, All: countsOf(of.All),
		Known: of.Known, Troubled: of.Troubled,
		Services: []api.ServiceHealth{},
	}
	for _, s := range of.Services {
		one := api.ServiceHealth{
			Namespace: s.Service.Namespace, Name: s.Service.Name, Gateways: s.Gateways, FailingOpen: s.Open,
			Unwell: s.Unwell, Trouble: s.Trouble(),
			Says: []api.GatewayHealth{},
		}
		for _, b := range s.Reports {
			says := api.GatewayHealth{
				Agent: b.Name, Gateway: b.Gateway, TargetCounts: countsOf(b.TargetCounts), FailingOpen: b.FailingOpen,
				Checked: b.Checked, Targets: []api.UnhealthyTarget{},
			}
			for _, t := range b.Targets {
				says.Targets = append(says.Targets,
					api.UnhealthyTarget{Address: t.Address.String(), Pod: t.Pod, Why: t.Why, Last: t.Last,
						Since: t.Since})
			}
			one.Says = append(one.Says, says)
		}
		h.Services = append(h.Services, one)
	}
	return h
}

func countsOf(c wire.TargetCounts) api.TargetCounts {
	return api.TargetCounts{Usable: c.Usable, Unknown: c.Unknown, Unhealthy: c.Unhealthy, Excluded: c.Excluded,
		Doubtful: c.Doubtful}
}
