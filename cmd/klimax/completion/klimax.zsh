#compdef klimax
# zsh completion for klimax
_klimax() {
    local line
    local -a candidates
    while IFS= read -r line; do
        if [[ $line == :files ]]; then
            _files
            return
        fi
        line=${line//:/\\:}
        candidates+=("${line/$'\t'/:}")
    done < <(klimax __complete "${(@)words[2,CURRENT]}" 2>/dev/null)
    _describe 'klimax' candidates
}
if [[ $funcstack[1] == _klimax ]]; then
    _klimax "$@"
else
    compdef _klimax klimax
fi
