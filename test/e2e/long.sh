#!/usr/bin/env bash
# What is too long for CI, for `make e2e-long`: parts of test/e2e, one after the other. A part that fails
# does not stop the others. PARTS is a regular expression for the names of those that run. BIN is where
# make build has put the programs. e2e-long.txt says when each part last passed, and at which commit.
set -uo pipefail
cd "$(dirname "$0")"
export REQUIRE_REAL=1
commit=$(git describe --always --dirty 2> /dev/null || echo unknown)
began="commit $commit, begun $(date -u +%FT%TZ)"
green=$PWD/../../e2e-long.txt
touch "$green"
echo "last green, of each part:"
cat "$green"
summary= failed=

# part NAME [VARIABLE=VALUE...] go test's arguments. NEEDS are what make gets for it besides.
part() {
	local name=$1 variables=() log result=ok from=$SECONDS
	shift
	[[ $name =~ ${PARTS:-} ]] || return 0
	while [[ $1 == [A-Z]*=* ]]; do
		if [[ $1 == NEEDS=* ]]; then make -C ../.. --no-print-directory ${1#NEEDS=}; else variables+=("$1"); fi
		shift
	done
	echo "=== $name: ${variables[*]} go test -v $*"
	log=$(mktemp)
	env "${variables[@]}" go test -v "$@" 2>&1 | tee "$log" || result=FAILED
	if grep -q 'no tests to run' "$log"; then result="FAILED: no tests to run"; fi
	rm "$log"
	if [ "$result" = ok ]; then
		{ grep -v "^$name " "$green"; printf '%-12s %s  commit %s  %5d s\n' "$name" "$(date -u +%FT%TZ)" "$commit" $((SECONDS - from)); } | sort > "$green.new"
		mv "$green.new" "$green"
	else
		failed="$failed $name"
	fi
	summary+=$(printf '  %-12s %5d s  %s' "$name" $((SECONDS - from)) "$result")$'\n'
}

part nodes NEEDS="envoy traefik contour envoy-gateway" ONLY= LAMEDUCK_BIN="$BIN" -tags e2e -count=1 -timeout 1h -run '^TestNodes$/^(Table|Gateways)$' ./nodes
part kernel NEEDS="envoy traefik nginx caddy" ONLY= REQUESTS=50000 LAMEDUCK_BIN="$BIN" -tags e2e -count=1 -timeout 1h -run '^TestNodes$/^Kernel$' ./nodes
part losses -count=20 -timeout 3h -run '^TestNoLossLetsAHeldDeletionThrough$' ./witness
part evictions-2 ENTRIES=2 ROUNDS=200 -count=1 -timeout 2h -run '^TestTwoEvictionsOfOneBudget$' ./witness
part evictions-3 ENTRIES=3 ROUNDS=200 -count=1 -timeout 2h -run '^TestTwoEvictionsOfOneBudget$' ./witness
part half -count=10 -timeout 1h -run '^TestHalfOfAService$' ./witness
part deadline -count=5 -timeout 1h -run '^TestADeadlineDoesNotBeginAgain$' ./witness
part drain -count=10 -timeout 1h -run '^TestKubectlDrain$' ./witness
part slow ROUNDS=10 -count=1 -timeout 1h -run '^TestScaleInWithSlowAcknowledgements$' ./witness
part clients NEEDS=clients LAMEDUCK_BIN="$BIN" -tags long -count=1 -timeout 20m -run '^TestOtherClients$' ./callers
part tokens AGENTS=1000 -count=3 -timeout 20m -run '^TestMadeUpTokens$' ./apiserver
for i in {1..10}; do # its namespaces stay until the cluster ends
	part "many-$i" DELETIONS=500 -count=1 -timeout 1h -run '^TestManyDeletionsAndOneSilentAgent$' ./scenarios
done
part policies NEEDS=kube-router LAMEDUCK_BIN="$BIN" -tags e2e,long -count=1 -timeout 20m -run '^TestNetworkPolicy$' ./quickstart
part discovery NEEDS=prometheus-kubernetes LAMEDUCK_BIN="$BIN" -tags long -count=1 -timeout 20m -run '^TestDiscovery$' ./discovery
part chart NEEDS="helm3 helm4" LAMEDUCK_BIN="$BIN" -tags long -count=1 -timeout 1h ./chart
part upstream NEEDS="upstream busybox curl" ONLY= LAMEDUCK_BIN="$BIN" -tags e2e,long -count=1 -timeout 3h -run '^TestUpstream$' ./nodes
part chaos SEED=1 MINUTES=10 LAMEDUCK_BIN="$BIN" -tags e2e,long -count=1 -timeout 40m -run '^TestChaos$' ./nodes
part pace LAMEDUCK_BIN="$BIN" -tags e2e,long -count=1 -timeout 30m -run '^TestPace$' ./nodes
for version in v1.30.14 v1.31.14 v1.32.13 v1.33.13 v1.34.4 v1.35.4 v1.37.2; do # the last one of each minor
	name=kubernetes-${version#v}
	[[ $name =~ ${PARTS:-} ]] || continue
	if source=$(../cluster/kubernetes/version.sh $version) &&
		(cd ../cluster && LAMEDUCK_CLUSTER_SRC=$source go run ./cmd/kubernetes-build control-plane); then
		part "$name" LAMEDUCK_CLUSTER_SRC="$source" -count=1 -timeout 30m ./apiserver ./scenarios
	else
		summary+="  $name  FAILED: it was not built"$'\n' failed="$failed $name"
	fi
done
part table LAMEDUCK_BIN="$BIN" -tags long -count=1 -timeout 1h -run '^TestTable$' ./witness
part scale LAMEDUCK_BIN="$BIN" -tags long -count=1 -timeout 1h -run '^TestScale$' ./scale
part restart LAMEDUCK_BIN="$BIN" -tags long -count=1 -timeout 1h -run '^TestRestart$' ./scale
part soak LAMEDUCK_BIN="$BIN" -tags long -count=1 -timeout 4h -run '^Test(Fit|Soak)$' ./soak

printf '\n%s\n%s' "$began" "$summary"
[ -n "$summary" ] || failed=" no part matches PARTS=$PARTS"
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
