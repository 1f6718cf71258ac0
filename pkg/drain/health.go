package drain

// Routes reports whether an agent has declared that it routes s, by name or as [EveryService].
func (l *Ledger) Routes(id AgentID, s Service) bool {
	a := l.agents[id]
	if a == nil {
		return false
	}
	_, named := a.routes[s]
	_, every := a.routes[EveryService]
	return named || every
}
