"""Evicts or deletes a pod once, as the defaults of Python's client do: evict|delete NAMESPACE POD."""
import sys

from kubernetes import client, config

verb, namespace, name = sys.argv[1:]
config.load_kube_config()
api = client.CoreV1Api()
try:
    if verb == "evict":
        metadata = client.V1ObjectMeta(namespace=namespace, name=name)
        api.create_namespaced_pod_eviction(name, namespace, client.V1Eviction(metadata=metadata))
    else:
        api.delete_namespaced_pod(name, namespace)
    print(200)
except client.ApiException as e:
    print(e.status)
