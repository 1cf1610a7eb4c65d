# Outlives its owner by a moment: kills every process group the owner started, then removes the owner's folders.
# Reads one verb a line from stdin; end of input means that the owner is gone, however it went.
trap '' HUP INT TERM
groups=' '
while IFS=' ' read -r verb what; do
  case $verb in
    start) groups="$groups$what " ;;
    stop) case $groups in *" $what "*) groups="${groups%% "$what" *} ${groups#* "$what" }" ;; esac ;;
    dir) set -- "$@" "$what" ;;
  esac
done
for group in $groups; do kill -s KILL -- "-$group" 2>/dev/null; done
# A process that is being killed may still create a file between two looks of rm.
tries=0
until [ $# -eq 0 ] || rm -rf -- "$@" 2>/dev/null || [ "$tries" -ge 50 ]; do
  tries=$((tries + 1))
  sleep 0.1
done
