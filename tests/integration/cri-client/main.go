// Command cri-client calls containerd's CRI services as the kubelet does. Everything that a request can hold can be
// JSON, because request and answer are the JSON form of the protocol's own messages.
//
//	cri-client METHOD            request on standard input, answer on standard output; a stream has a line per answer
//	cri-client stream URL        what Exec and Attach have answered with: standard input and output are the container's
//	cri-client registry BLOBS    serves the blobs of a content store as an image registry on port 80 of the node
//
// A refusal is printed on standard error as "Code: message", with exit code 1. CRI_ENDPOINT in the environment names
// another socket, CRI_TIMEOUT another deadline (Go's form; 0 sets none).
package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/net/websocket"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/dynamicpb"
	_ "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	endpoint = "unix:///run/containerd/containerd.sock"
	limit    = "2m"
)

// set returns a variable of the environment or what it is without one.
func set(name, otherwise string) string {
	if value, is := os.LookupEnv(name); is {
		return value
	}
	return otherwise
}

func main() {
	var err error
	switch arguments := os.Args[1:]; {
	case len(arguments) == 1:
		err = call(arguments[0])
	case len(arguments) == 2 && arguments[0] == "stream":
		err = stream(arguments[1])
	case len(arguments) == 2 && arguments[0] == "registry":
		err = registry(arguments[1])
	default:
		err = fmt.Errorf("usage: cri-client METHOD | stream URL | registry BLOBS")
	}
	if err == nil {
		return
	}
	if reply, is := status.FromError(err); is {
		fmt.Fprintf(os.Stderr, "%s: %s\n", reply.Code(), reply.Message())
	} else {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(1)
}

// call sends one request.
func call(name string) error {
	method, err := find(name)
	if err != nil {
		return err
	}
	input, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	request, answer := dynamicpb.NewMessage(method.Input()), dynamicpb.NewMessage(method.Output())
	if err := protojson.Unmarshal(input, request); err != nil {
		return err
	}
	daemon, err := grpc.NewClient(set("CRI_ENDPOINT", endpoint), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer daemon.Close()
	deadline, err := time.ParseDuration(set("CRI_TIMEOUT", limit))
	if err != nil {
		return err
	}
	ctx := context.Background()
	if deadline > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, deadline)
		defer cancel()
	}
	path := fmt.Sprintf("/%s/%s", method.Parent().FullName(), method.Name())
	if method.IsStreamingServer() {
		return follow(ctx, daemon, path, request, answer)
	}
	if err := daemon.Invoke(ctx, path, request, answer); err != nil {
		return err
	}
	// Also values that are zero: the first of an enumeration is one of them.
	reply, err := protojson.MarshalOptions{EmitUnpopulated: true}.Marshal(answer)
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(reply)
	return err
}

// follow prints each answer of a stream, until it ends.
func follow(ctx context.Context, daemon *grpc.ClientConn, path string, request, answer *dynamicpb.Message) error {
	answers, err := daemon.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, path)
	if err != nil {
		return err
	}
	if err := answers.SendMsg(request); err != nil {
		return err
	}
	if err := answers.CloseSend(); err != nil {
		return err
	}
	for {
		if err := answers.RecvMsg(answer); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		line, err := protojson.Marshal(answer)
		if err != nil {
			return err
		}
		fmt.Println(string(line))
	}
}

// find looks a method up in the services of the protocol.
func find(name string) (protoreflect.MethodDescriptor, error) {
	for _, service := range []protoreflect.FullName{"runtime.v1.RuntimeService", "runtime.v1.ImageService"} {
		found, err := protoregistry.GlobalFiles.FindDescriptorByName(service)
		if err != nil {
			return nil, err
		}
		if method := found.(protoreflect.ServiceDescriptor).Methods().ByName(protoreflect.Name(name)); method != nil {
			return method, nil
		}
	}
	return nil, fmt.Errorf("no method %s", name)
}

// stream passes standard input on and prints what comes back, until the other side has ended. The first byte of every
// message shows which stream it is of.
func stream(url string) error {
	config, err := websocket.NewConfig(strings.Replace(url, "http://", "ws://", 1), url)
	if err != nil {
		return err
	}
	config.Protocol = []string{"v4.channel.k8s.io"}
	peer, err := websocket.DialConfig(config)
	if err != nil {
		return err
	}
	go func() {
		piece := make([]byte, 4096)
		for {
			got, err := os.Stdin.Read(piece)
			if err != nil {
				return
			}
			if websocket.Message.Send(peer, append([]byte{0}, piece[:got]...)) != nil {
				return
			}
		}
	}()
	for {
		var message []byte
		if err := websocket.Message.Receive(peer, &message); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if len(message) < 2 {
			continue
		}
		switch text := string(message[1:]); message[0] {
		case 1:
			fmt.Print(text)
		case 2:
			fmt.Fprint(os.Stderr, text)
		case 3:
			fmt.Println(text)
		}
	}
}

// registry gives blobs and manifests by their digest. It reports when it is ready.
func registry(blobs string) error {
	socket, err := net.Listen("tcp", "127.0.0.1:80")
	if err != nil {
		return err
	}
	fmt.Println("ready")
	return http.Serve(socket, http.HandlerFunc(func(to http.ResponseWriter, asked *http.Request) {
		digest, is := strings.CutPrefix(filepath.Base(asked.URL.Path), "sha256:")
		if !is {
			// Also how a client asks whether this is a registry at all.
			if asked.URL.Path != "/v2/" {
				http.NotFound(to, asked)
			}
			return
		}
		if strings.Contains(asked.URL.Path, "/manifests/") {
			to.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
		}
		to.Header().Set("Docker-Content-Digest", "sha256:"+digest)
		http.ServeFile(to, asked, filepath.Join(blobs, digest))
	}))
}
