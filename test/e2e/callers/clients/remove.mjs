// Evicts or deletes a pod once, as the defaults of Node's client do: evict|delete NAMESPACE POD.
import { ApiException, CoreV1Api, KubeConfig } from "@kubernetes/client-node";

const [verb, namespace, name] = process.argv.slice(2);
const config = new KubeConfig();
config.loadFromDefault();
const api = config.makeApiClient(CoreV1Api);
try {
  if (verb === "evict") {
    const body = { apiVersion: "policy/v1", kind: "Eviction", metadata: { namespace, name } };
    await api.createNamespacedPodEviction({ namespace, name, body });
  } else {
    await api.deleteNamespacedPod({ namespace, name });
  }
  console.log(200);
} catch (e) {
  if (!(e instanceof ApiException)) throw e;
  console.log(e.code);
}
